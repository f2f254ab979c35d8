"""Products into the residual as they are chosen, by the library, and by the library in parts of K, on the GPU.

    python -m tests.gpu.tuning.bench_parts times.jsonl [--seconds 75] [--rows 2048 4096] [--inputs 8192 14336]

Writes a JSON line for each number of rows, inputs and tokens: microseconds with the norm behind the product, medians of
five replays. Weights are more than the L2 cache holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from pagebus.kernels.layers.norm import add_rms_norm
from pagebus.kernels.linear.candidates import LIBRARY_SPLITS
from pagebus.kernels.linear.library_parts import LibraryConfig
from pagebus.kernels.linear.linear import partial_linear
from pagebus.kernels.linear.tuning.timing import graph_microseconds

ROWS = (4096, 5120, 3584, 2048, 3072, 8192, 2560, 6144, 7168, 4608, 3840, 2304)
INPUTS = (4096, 14336, 8192, 18944, 2048, 11008, 5120, 24576, 3072, 9216, 28672, 6144, 12288)
TOKENS = (96, 128, 192, 256)
POOL = 300_000_000
"""Numbers from which weights are cut."""


def times(pool: torch.Tensor, rows: int, inputs: int, tokens: int) -> dict[str, float]:
    """Microseconds by what multiplies; the keys of parts are how many there are."""
    count = min(8, len(pool) // (rows * inputs))
    weights = pool[: count * rows * inputs].view(count, rows, inputs)
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device="cuda")
    residual, norm = torch.zeros_like(x[:, :1]).repeat(1, rows), torch.ones(rows, dtype=torch.bfloat16, device="cuda")

    def step(product: Callable[..., object], index: int) -> None:
        result = product(x, weights[index % count])
        assert isinstance(result, torch.Tensor)
        add_rms_norm(result, residual, norm, 1e-5)

    ways: dict[str, Callable[..., object]] = {"library": F.linear, "chosen": partial_linear}
    fitting = (config for config in map(LibraryConfig, LIBRARY_SPLITS) if config.fits(inputs))
    ways |= {str(config.splits): partial(partial_linear, config=config) for config in fitting}
    launches = max(3, min(16, 2 * POOL // (rows * inputs)))
    return {
        name: round(graph_microseconds([partial(step, way, index) for index in range(launches)]), 2)
        for name, way in ways.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=75, help="begin nothing later than this")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--inputs", nargs="+", type=int, default=INPUTS)
    arguments = parser.parse_args()
    end_s = time.monotonic() + arguments.seconds
    pool = torch.empty(POOL, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    with arguments.out.open("a") as file:
        for rows, inputs in itertools.product(arguments.rows, arguments.inputs):
            if time.monotonic() > end_s:
                raise SystemExit(f"no time for {rows} rows of {inputs} inputs and what comes behind")
            for tokens in TOKENS:
                found = times(pool, rows, inputs, tokens)
                print(json.dumps({"rows": rows, "inputs": inputs, "tokens": tokens, **found}), file=file, flush=True)


if __name__ == "__main__":
    main()
