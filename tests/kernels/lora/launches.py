"""Launches of adapters' kernels, on tensors of no memory, that are compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagebus.kernels.lora.expand import expand
from pagebus.kernels.lora.pages import PLACE_FIELDS, PagedTable
from pagebus.kernels.lora.plan import AdapterPlan, most_segments, plan_adapters, segment_tokens
from pagebus.kernels.lora.segments import Segments
from pagebus.kernels.lora.shrink import shrink

QKV, DOWN = (4096, (4096, 1024, 1024)), (14336, (4096,))


def adapters() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each case and its launch: q, k and v, and the product with most inputs, of decodes and of prompts."""
    for tokens in (1, 64, 2048):
        for inputs, widths in (QKV, DOWN):
            for pages in (1, 40):
                case = f"bf16 adapters of {inputs} inputs and {len(widths)} modules in {pages} pages, {tokens} tokens"
                yield case, partial(_both_halves, tokens, inputs, widths, pages)
    yield "fp32 adapters of 64 tokens", partial(_both_halves, 64, *QKV, 1, torch.float32)
    yield "plan of adapters", partial(plan_adapters, meta_ints(256), meta_ints(257), 2048, 66, 64)


def meta_ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def meta_table(widths: tuple[int, ...], pages: int, dtype: torch.dtype = torch.bfloat16) -> PagedTable:
    """64 adapters of rank 64 at most."""
    memory, starts = (torch.empty(64, pages, dtype=each, device="meta") for each in (dtype, torch.int64))
    scales = torch.empty(64, len(widths), device="meta")
    return PagedTable(memory, starts, meta_ints(64, PLACE_FIELDS), scales, widths, 64, 1 << 20)


def meta_plan(tokens: int) -> AdapterPlan:
    size = segment_tokens(tokens)
    columns = (meta_ints(most_segments(tokens, 66, size)) for _ in range(3))
    return AdapterPlan(Segments(*columns, meta_ints(1)), meta_ints(tokens), size)


def _both_halves(
    tokens: int, inputs: int, widths: tuple[int, ...], pages: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    table, plan = meta_table(widths, pages, dtype), meta_plan(tokens)
    s = shrink(torch.empty(tokens, inputs, dtype=dtype, device="meta"), table, plan)
    expand(s, table, plan, torch.empty(tokens, sum(widths), dtype=dtype, device="meta"))
