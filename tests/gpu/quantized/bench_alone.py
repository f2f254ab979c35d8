"""Times products of 8 bits by 8 bits of 96 to 256 tokens, in tiles that fill a multiprocessor and by the library:

    python -m tests.gpu.quantized.bench_alone fp8-rounded times.jsonl [--products partial:4096x14336 plain:6144x4096]

A line for each product and number of tokens has microseconds with the norm beside the product, by launch shape: rows by
tokens, stages, parts of K, and whether tiles come through the tensor memory accelerator.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product as combinations
from pathlib import Path

from pagebus.kernels.linear.shapes import SPLIT_FORMS, Product
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.quantized.byte_choice import ALONE
from pagebus.kernels.quantized.tuning.timing import QuantizedBench

TOKENS = (256, 192, 128, 96)
PRODUCTS = (
    *(f"partial:{size}" for size in (
        "4096x4096", "4096x14336", "3584x3584", "3584x18944", "5120x5120", "5120x13824", "5120x27648", "5120x17920",
        "2048x8192", "2048x2048", "3072x8192", "3072x3072", "8192x8192", "8192x28672", "4096x12288", "2560x9728",
        "8192x14336", "4096x7168",
    )),
    *(f"plain:{size}" for size in (
        "6144x4096", "4608x3584", "7168x5120", "10240x8192", "3072x2048", "5120x3072", "6144x2560",
    )),
)  # fmt: skip


def candidates(product: Product) -> Iterator[tuple[str, TileConfig]]:
    """Launch shapes and their names: each of ALONE, and with four stages that of 128 rows."""
    splits = (1, 2, 4) if product.form in SPLIT_FORMS else (1,)
    shapes = (*combinations(ALONE.values(), (False, True)), (replace(ALONE[128], stages=4), False))
    for (shape, tma), parts in combinations(shapes, splits):
        config = replace(shape, splits=parts, tma=tma)
        if config.fits(product.inputs):
            yield f"{config.rows}x{config.tokens} s{config.stages} k{parts}{' tma' if tma else ''}", config


def times_of(bench: QuantizedBench, tokens: int) -> dict[str, float]:
    """Microseconds by name."""
    configs = (("library", None), *candidates(bench.product))
    return {name: round(bench.microseconds(config, tokens), 2) for name, config in configs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=("fp8-rounded", "int8-rounded"))
    parser.add_argument("record", type=Path)
    parser.add_argument("--products", nargs="+", default=PRODUCTS)
    arguments = parser.parse_args()
    with arguments.record.open("w") as file:
        for name in arguments.products:
            bench = QuantizedBench(Product.parse(f"{name}:{arguments.layout}"))
            for tokens in TOKENS:
                times = times_of(bench, tokens)
                print(
                    f"{name} {tokens}: the library {times['library']}, {min(times, key=lambda each: times[each])} first"
                )
                file.write(json.dumps({"product": name, "tokens": tokens, **times}) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
