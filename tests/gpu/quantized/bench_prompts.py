"""Times the pieces of a layer of Llama-8B in FP8 with many tokens: `python -m tests.gpu.quantized.bench_prompts`.

Norms, roundings, activation and products, each alone in a CUDA graph, and what they are together: in kernels of their
own, and with norms and activation that round themselves. Attention, rotation and the cache are left out. The floor is
bytes at 4.30 TB/s, or operations at 1,580 TFLOP/s.

``--scalings`` times the products alone for 0.3 seconds each, with the GPU's clock and power at the end: with scales of
rows, or of tensors, by sums of 14 bits or of float32, and of numbers that are normal or uniform. It says whether power
or the library's kernel bounds them.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as combinations
from typing import NamedTuple

import torch

from pagebus.kernels.coded.rounding import round_tokens
from pagebus.kernels.layers.norm import add_rms_norm
from pagebus.kernels.linear.activation import activation_mul, rounded_activation_mul
from pagebus.kernels.linear.tuning.timing import graph_microseconds

HIDDEN, WIDTH, PROJECTED = 4096, 14336, 6144
BYTES_PER_US, OPERATIONS_PER_US = 4.30e6, 1.58e9
CUDA, E4M3 = torch.device("cuda"), torch.float8_e4m3fn
CALLS, SUSTAINED_US = 8, 1e5
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader")


class Piece(NamedTuple):
    """``count`` in a layer whose roundings are kernels of their own, ``fused`` in one where they are not."""

    name: str
    count: int
    fused: int
    floor: float
    call: Callable[[], object]


def _product(tokens: int, rows: int, columns: int) -> Piece:
    values, weight = (torch.randn(size, columns, device=CUDA).to(E4M3) for size in (tokens, rows))
    scale, scales = torch.rand(tokens, 1, device=CUDA), torch.rand(1, rows, device=CUDA)

    def call() -> object:
        return torch._scaled_mm(
            values, weight.t(), scale_a=scale, scale_b=scales, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Piece(f"{rows} x {columns}", 1, 1, 2 * tokens * rows * columns / OPERATIONS_PER_US, call)


def pieces(tokens: int) -> Iterator[Piece]:
    """In no order."""

    def random(size: int) -> torch.Tensor:
        return torch.randn(tokens, size, device=CUDA).bfloat16()

    def floor(bytes_: int) -> float:
        return tokens * bytes_ / BYTES_PER_US

    x, hidden, gates, norm = (
        random(HIDDEN),
        random(WIDTH),
        random(2 * WIDTH),
        torch.ones(HIDDEN, device=CUDA).bfloat16(),
    )
    residual = torch.zeros_like(x)
    yield Piece("add and norm", 2, 0, floor(8 * HIDDEN), lambda: add_rms_norm(x, residual, norm, 1e-5))
    yield Piece("round the norm", 2, 0, floor(3 * HIDDEN), lambda: round_tokens(x, E4M3))
    yield Piece("round attention", 1, 1, floor(3 * HIDDEN), lambda: round_tokens(x, E4M3))
    yield Piece("silu(gate) * up", 1, 0, floor(6 * WIDTH), lambda: activation_mul(gates))
    yield Piece("round the activation", 1, 0, floor(3 * WIDTH), lambda: round_tokens(hidden, E4M3))
    yield Piece(
        "add, norm and round", 0, 2, floor(7 * HIDDEN), lambda: add_rms_norm(x, residual, norm, 1e-5, rounded=E4M3)
    )
    yield Piece("silu(gate) * up, rounded", 0, 1, floor(5 * WIDTH), lambda: rounded_activation_mul(gates, "silu", E4M3))
    for rows, columns in ((PROJECTED, HIDDEN), (HIDDEN, HIDDEN), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        yield _product(tokens, rows, columns)


def _numbers(size: int, columns: int, kind: str) -> torch.Tensor:
    """Rounded as activations and weights are, the largest of a row 448; or any, as those of dummy weights."""
    if kind == "uniform":
        return torch.randint(-100, 101, (size, columns), device=CUDA).to(E4M3)
    return round_tokens(torch.randn(size, columns, device=CUDA).bfloat16(), E4M3)[0]


def scalings(tokens: int) -> None:
    """Prints microseconds, TFLOP/s, megahertz and watts."""
    for rows, columns in ((PROJECTED, HIDDEN), (HIDDEN, HIDDEN), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        for kind, by, fast in combinations(("normal", "uniform"), ("rows", "tensor"), (True, False)):
            if not fast and (kind, by) != ("normal", "tensor"):
                continue
            x, weight = _numbers(tokens, columns, kind), _numbers(rows, columns, kind)
            sizes = ((tokens, 1), (1, rows)) if by == "rows" else ((), ())
            given = dict(zip(("scale_a", "scale_b"), (torch.ones(size, device=CUDA) for size in sizes), strict=True))
            call = partial(
                torch._scaled_mm, x, weight.t(), **given, out_dtype=torch.bfloat16, use_fast_accum=fast
            )  # fmt: skip
            flops = 2 * tokens * rows * columns
            calls = max(8, int(SUSTAINED_US * OPERATIONS_PER_US / flops))
            us = graph_microseconds([call] * calls, 3)
            said = subprocess.run(QUERY, capture_output=True, text=True, check=False).stdout.splitlines()[:1]
            name = f"{rows} x {columns} {kind:7} {by:6} {'14 bits' if fast else 'float32':7}"
            print(f"{tokens:>6} {name} {us:8.1f} us {flops / us / 1e6:6.0f} TF/s {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--scalings", action="store_true", help="time ways to scale the products instead")
    torch.manual_seed(0)
    arguments = parser.parse_args()
    for tokens in arguments.tokens:
        if arguments.scalings:
            scalings(tokens)
            continue
        total = fused = 0.0
        for piece in pieces(tokens):
            us = graph_microseconds([piece.call] * CALLS)
            total, fused = total + piece.count * us, fused + piece.fused * us
            print(f"{tokens:>6} {piece.name:24} {us:8.1f} us, floor {piece.floor:8.1f}", flush=True)
        print(f"{tokens:>6} {'layer, each alone':24} {total:8.1f} us, fused {fused:8.1f}", flush=True)


if __name__ == "__main__":
    main()
