"""Times the products of a decode step, as they are chosen and by the library: `python -m tests.gpu.bench.bench_linear`.

Each figure is a product with the norm beside it, weights from memory, in a CUDA graph
(`pagebus.kernels.linear.tuning.timing`). The share is that of the speed at which an H200 copies memory, 4.30 TB/s.
"""

from __future__ import annotations

import argparse

import torch

from pagebus.kernels.linear.dispatch import choose
from pagebus.kernels.linear.shapes import BUCKETS, Product
from pagebus.kernels.linear.tuning.timing import Bench

COPY_BYTES_PER_US = 4.30e6
MODELS = {
    "llama8b": ("plain:6144x4096", "partial:4096x4096", "gated:28672x4096", "partial:4096x14336", "wide:128256x4096"),
    "qwen06b": ("plain:4096x1024", "partial:1024x2048", "gated:6144x1024", "partial:1024x3072", "wide:151936x1024"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    torch.manual_seed(0)
    print(f"{'product':28} {'tokens':>6} {'library us':>10} {'us':>8} {'TB/s':>6} {'share':>6}  launch shape")
    for model in parser.parse_args().models or MODELS:
        for name in MODELS[model]:
            product = Product.parse(name)
            bench, bytes_ = Bench(product), product.rows * product.inputs * 2
            for tokens in BUCKETS:
                config = choose(product.form, bench.x[:tokens], bench.weights[0])
                library = bench.microseconds(None, tokens)
                time = library if config is None else bench.microseconds(config, tokens)
                print(
                    f"{model + ' ' + name:28} {tokens:>6} {library:>10.2f} {time:>8.2f} {bytes_ / time / 1e6:>6.2f} "
                    f"{bytes_ / time / COPY_BYTES_PER_US:>6.0%}  {config or 'library'}"
                )


if __name__ == "__main__":
    main()
