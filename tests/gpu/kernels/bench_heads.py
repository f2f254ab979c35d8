"""Times attention by the shape of heads, one layer: `python -m tests.gpu.kernels.bench_heads [--only 256] [--check]`.

Kernels are first compiled in processes of their own, all at once. Decodes: one kernel for all that lies between two
products (fused), and two in turn. Prompts: the plain kernel and the one for long prompts on Hopper GPUs, TFLOP/s of the
pairs of queries and keys that are seen; fresh prompts read keys as projected, chunks behind a past have them copied.
--check also compares the results of both kernels for prompts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagebus.kernels.attention import hopper_prefill
from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.hopper_prefill import HeadShape, gain_s, hopper_attention, seen_keys
from pagebus.kernels.attention.paged_attention import (
    AttentionShape,
    Spans,
    cut_prompts,
    paged_attention,
    plan_attention,
)
from pagebus.kernels.attention.rotary_attention import rotary_attention
from pagebus.kernels.attention.rotary_attention import supports as fuses
from pagebus.kernels.common.target import num_multiprocessors, target_of
from pagebus.kernels.layers.rotary_kv_write import rotary_kv_write
from pagebus.kernels.linear.tuning.timing import graph_microseconds

CUDA = torch.device("cuda")
BLOCK_SIZE, LAYERS = 16, 8
PROCESSES = 12


class Shape(NamedTuple):
    """Heads of a model; window 0: none."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        more = f" window {self.window}" * bool(self.window) + f" cap {self.softcap:.0f}" * bool(self.softcap)
        half = " f16" * (self.dtype == torch.float16)
        return f"{self.name}: {self.q_heads}/{self.kv_heads} d{self.head_dim}{more}{half}"


DECODES = (
    Shape("llama8b", 32, 8, 128), Shape("llama70b", 64, 8, 128), Shape("qwen30b", 32, 4, 128),
    Shape("qwen235b", 64, 4, 128), Shape("gemma12b", 16, 8, 256), Shape("qwen3.5", 16, 2, 256),
    Shape("gptoss", 64, 8, 64), Shape("phi3", 32, 32, 96), Shape("stablelm", 32, 8, 80),
)  # fmt: skip
BATCHES = ((1, 576), (8, 576), (32, 576), (64, 576), (8, 8192))
PROMPTS = (
    Shape("llama8b", 32, 8, 128), Shape("mistral", 32, 8, 128, 4096), Shape("gemma3", 16, 8, 256),
    Shape("gemma3", 16, 8, 256, 1024), Shape("gemma2", 16, 8, 256, 4096, 50.0), Shape("gptoss", 64, 8, 64),
    Shape("gptoss", 64, 8, 64, 128), Shape("phi3", 32, 32, 96), Shape("llama8b", 32, 8, 128, 0, 0.0, torch.float16),
)  # fmt: skip
STEPS = ((16, 512, 512), (4, 2048, 2048), (1, 8192, 8192), (1, 4096, 16384))
"""Rows, new tokens of each, context."""


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


class Cache:
    """Pages of some layers; every row gets blocks in random order."""

    def __init__(self, shape: Shape, rows: int, context: int) -> None:
        width = -(-context // BLOCK_SIZE)
        pages = (rows * width, LAYERS, 2, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        self._data = torch.empty(pages, dtype=shape.dtype, device=CUDA)
        for blocks in self._data.split(256):
            blocks.normal_()
        self.table = torch.randperm(rows * width, device=CUDA, dtype=torch.int32).view(rows, width)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._data[:, index, 0], self._data[:, index, 1]


def decode_microseconds(shape: Shape, rows: int, context: int, *, fused: bool, timed: bool = True) -> float:
    """What a layer's attention adds to a product, from rotation on."""
    cache, slots, lens = Cache(shape, rows, context), ints([*range(rows)]), ints([context] * rows)
    qkv = torch.randn(rows, shape.q_heads + 2 * shape.kv_heads, shape.head_dim, device=CUDA).to(shape.dtype)
    out = torch.empty_like(qkv[:, : shape.q_heads]).contiguous()
    angle = torch.rand(context, shape.head_dim // 2, device=CUDA)
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1)
    norm = torch.rand(shape.head_dim, device=CUDA).to(shape.dtype)
    norms = {"q_norm": norm, "k_norm": norm, "eps": 1e-6}
    last = lens.long() - 1
    mapping = cache.table[slots.long(), last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
    heads = AttentionShape(shape.q_heads, shape.kv_heads, shape.head_dim, 2)
    plan = plan_attention(slots, lens, heads)
    words = {"slots": slots, "context_lens": lens, "block_tables": cache.table, "scale": shape.head_dim**-0.5}
    weight = torch.randn(1024, shape.q_heads * shape.head_dim, device=CUDA).to(shape.dtype)
    starts = ints([*range(rows + 1)])

    def layer(index: int, *, attends: bool) -> Callable[[], None]:
        k, v = cache.layer(index)

        def call() -> None:
            result = out
            if attends and fused:
                result = rotary_attention(qkv, cos_sin, k, v, plan=plan, **words, **norms)
            elif attends:
                q = rotary_kv_write(qkv, last, cos_sin, k, v, mapping, **norms)
                result = paged_attention(q, k, v, query_start=starts, num_decodes=rows, plan=plan, out=out, **words)
            F.linear(result.flatten(1), weight)

        return call

    if not timed:
        layer(0, attends=True)()
        return 0.0
    times = [graph_microseconds([layer(index % LAYERS, attends=attends) for index in range(24)], replays=7)
             for attends in (True, False)]  # fmt: skip
    return times[0] - times[1]


class Prompts:
    """A step of prompts, by either kernel."""

    def __init__(self, shape: Shape, rows: int, queries: int, context: int) -> None:
        self.shape, self._cache = shape, Cache(shape, rows, context)
        tokens = rows * queries
        qkv = torch.randn(tokens, shape.q_heads + 2 * shape.kv_heads, shape.head_dim, device=CUDA).to(shape.dtype)
        sizes = shape.q_heads, shape.kv_heads, shape.kv_heads
        self._q, *projected = qkv.split_with_sizes(sizes, dim=1)
        self._projected = (projected[0], projected[1]) if queries == context else None
        self._out = torch.empty(tokens, shape.q_heads, shape.head_dim, dtype=shape.dtype, device=CUDA)
        self.rows = tuple(LongRow(row, row * queries, queries, context, True) for row in range(rows))
        self._slots, self._lens = ints([*range(rows)]), ints([context] * rows)
        self._starts = ints([row * queries for row in range(rows + 1)])
        heads = AttentionShape(shape.q_heads, shape.kv_heads, shape.head_dim, 2, frozenset({shape.window}))
        cut = cut_prompts(self._starts.cpu().numpy(), self._lens.cpu().numpy(), 0, heads, CUDA)
        empty = ints([])
        self._plan = plan_attention(empty, empty, heads, Spans.copied(cut, CUDA))

    @property
    def operations(self) -> float:
        pairs = sum(seen_keys(row, self.shape.window) for row in self.rows)
        return 4.0 * pairs * self.shape.q_heads * self.shape.head_dim

    def call(self, layer: int, *, hopper: bool) -> Callable[[], torch.Tensor]:
        (k, v), shape, scale = self._cache.layer(layer % LAYERS), self.shape, self.shape.head_dim**-0.5

        def plain() -> torch.Tensor:
            return paged_attention(
                self._q, k, v, slots=self._slots, query_start=self._starts, context_lens=self._lens,
                block_tables=self._cache.table, scale=scale, num_decodes=0, sliding_window=shape.window,
                softcap=shape.softcap, plan=self._plan, out=self._out,
            )  # fmt: skip

        def long(projected: tuple[torch.Tensor, torch.Tensor] | None = self._projected) -> torch.Tensor:
            hopper_attention(
                self._q, k, v, self._out, self._slots, self._cache.table, scale, self.rows, None, projected,
                shape.window, shape.softcap,
            )  # fmt: skip
            return self._out

        return long if hopper else plain

    def error(self) -> float:
        """How far both kernels' results lie apart, over the same pages."""
        self._projected = None
        expected = self.call(0, hopper=False)().double()
        return float((self.call(0, hopper=True)().double() - expected).norm() / expected.norm())


def warm(job: tuple[Shape, bool]) -> str | None:
    """Compile what a shape needs: launch once, in a process of its own. What went wrong, if anything."""
    shape, decodes = job
    try:
        if decodes:
            for fused in {False, fuses(shape.q_heads, shape.kv_heads, shape.head_dim)}:
                for rows in (1, 32):
                    decode_microseconds(shape, rows, 64, fused=fused, timed=False)
            return None
        for step in ((1, 128, 128), (1, 4096, 16384)):
            prompts = Prompts(shape, *step)
            prompts.call(0, hopper=False)()
            if _has_hopper(shape):
                prompts.call(0, hopper=True)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{shape}: {str(error)[:500]}"
    return None


def _has_hopper(shape: Shape) -> bool:
    return hopper_prefill.supports(shape.dtype, shape.head_dim, target_of(CUDA))


def decode_line(shape: Shape) -> None:
    line = f"{shape!s:26}"
    for rows, context in BATCHES:
        size = 4 * rows * context * shape.kv_heads * shape.head_dim
        two = decode_microseconds(shape, rows, context, fused=False)
        one = float("nan")
        if fuses(shape.q_heads, shape.kv_heads, shape.head_dim):
            one = decode_microseconds(shape, rows, context, fused=True)
        line += f" | {two:7.1f} {one:7.1f} {size / min(two, one if one == one else two) / 1e6:5.2f}"
    print(line, flush=True)


def prompt_line(shape: Shape, check: bool) -> None:
    line = f"{shape!s:32}"
    for step in STEPS:
        prompts = Prompts(shape, *step)
        heads = HeadShape(shape.q_heads, shape.kv_heads, shape.head_dim, (shape.window,))
        estimate = sum(gain_s(row, heads) for row in prompts.rows) * 1e6
        for hopper in (False, True):
            if hopper and not _has_hopper(shape):
                continue
            us = graph_microseconds([prompts.call(layer, hopper=hopper) for layer in range(4)], replays=5)
            line += f" {'|' if not hopper else ''} {us:7.0f} {prompts.operations / us / 1e6:4.0f}"
        line += f" ({estimate:5.0f})"
        if check and _has_hopper(shape):
            line += f" error {prompts.error():.1e}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    decodes, prompts = ([shape for shape in shapes if arguments.only in str(shape)] for shapes in (DECODES, PROMPTS))
    began = time.perf_counter()
    jobs = [(shape, False) for shape in prompts] + [(shape, True) for shape in decodes]
    with multiprocessing.get_context("spawn").Pool(min(PROCESSES, max(1, len(jobs)))) as pool:
        for problem in pool.imap(warm, jobs):
            if problem:
                print(problem, flush=True)
    print(f"compiled in {time.perf_counter() - began:.0f} s; {num_multiprocessors(CUDA)} multiprocessors", flush=True)
    print(f"decodes, us a layer: two kernels, one, TB/s of the better; {', '.join(f'{r} x {c}' for r, c in BATCHES)}")
    for shape in decodes:
        decode_line(shape)
    print(f"prompts: plain us TFLOP/s, Hopper us TFLOP/s (gain as estimated); {', '.join(map(str, STEPS))}")
    for shape in prompts:
        prompt_line(shape, arguments.check)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
