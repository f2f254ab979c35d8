"""Times the pieces of a layer of Llama-8B in FP8 with many tokens: `python -m tests.gpu.quantized.bench_prompts`.

Norms, roundings, activation and products, each alone in a CUDA graph, and what they are together: in kernels of their
own, and with norms and activation that round themselves. Attention, rotation and the cache are left out. The floor is
bytes at 4.30 TB/s, or operations at 1,580 TFLOP/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from pagebus.kernels.coded.rounding import round_tokens
from pagebus.kernels.layers.norm import add_rms_norm
from pagebus.kernels.linear.activation import activation_mul, rounded_activation_mul
from pagebus.kernels.linear.timing import graph_microseconds

HIDDEN, WIDTH, PROJECTED = 4096, 14336, 6144
BYTES_PER_US, OPERATIONS_PER_US = 4.30e6, 1.58e9
CUDA, E4M3 = torch.device("cuda"), torch.float8_e4m3fn
CALLS = 8


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    torch.manual_seed(0)
    for tokens in parser.parse_args().tokens:
        total = fused = 0.0
        for piece in pieces(tokens):
            us = graph_microseconds([piece.call] * CALLS)
            total, fused = total + piece.count * us, fused + piece.fused * us
            print(f"{tokens:>6} {piece.name:24} {us:8.1f} us, floor {piece.floor:8.1f}", flush=True)
        print(f"{tokens:>6} {'layer, each alone':24} {total:8.1f} us, fused {fused:8.1f}", flush=True)


if __name__ == "__main__":
    main()
