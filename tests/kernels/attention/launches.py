"""Launches that are compiled for GPUs that are not here: tensors without memory, the kernel for long prompts over heads
of every padded size, and decodes in every form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.decode_plan import plan_decodes
from pagebus.kernels.attention.forms.form import FORMS, DecodeForm
from pagebus.kernels.attention.hopper_prefill import hopper_attention
from pagebus.kernels.attention.paged_attention import (
    AttentionPlan,
    AttentionShape,
    Spans,
    capability_of,
    paged_attention,
    plan_attention,
)
from pagebus.kernels.attention.rotary_attention import rotary_attention
from pagebus.kernels.common.int8 import block_bytes, split_blocks

CASES = (  # query heads, KV heads, head dim, format, window, soft cap, sinks
    (32, 8, 128, torch.bfloat16, 0, 0.0, False), (32, 8, 128, torch.bfloat16, 4096, 0.0, False),
    (64, 8, 64, torch.float16, 128, 0.0, False), (64, 8, 64, torch.bfloat16, 128, 0.0, True),
    (32, 32, 96, torch.bfloat16, 0, 0.0, False),
    (16, 8, 256, torch.bfloat16, 0, 0.0, False), (16, 8, 256, torch.bfloat16, 1024, 50.0, False),
)  # fmt: skip
WIDE = (64, 8, 128, torch.bfloat16, 0, 0.0, False)


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_cache(dtype: torch.dtype, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Keys and values of the second of two layers, and their scales or None."""
    if dtype == torch.int8:
        blocks = meta(1024, block_bytes(2, 16, kv_heads, head_dim), dtype=dtype)
        numbers, scales = split_blocks(blocks, 2, kv_heads, head_dim)
        return numbers[:, 1, 0], numbers[:, 1, 1], scales[1]
    cache = meta(1024, 2, 2, 16, kv_heads, head_dim, dtype=dtype)
    scales = meta(2, kv_heads, dtype=torch.float32) if dtype.itemsize == 1 else None
    return cache[:, 1, 0], cache[:, 1, 1], scales


def attentions() -> Iterator[tuple[str, Callable[[], None]]]:
    """Of long prompts, of decodes with drafts, of few tokens behind a past, and of decodes in every form, by name."""
    yield from long_prompts()
    yield from runs()
    yield from few()
    for form in FORMS:
        yield f"raw 32/2 d128 cache bf16 {form}", partial(_launch_form, torch.bfloat16, form)
    yield "raw 32/2 d128 cache fp8e4nv", partial(_launch_form, torch.float8_e4m3fn, DecodeForm(apart=True))


def long_prompts() -> Iterator[tuple[str, Callable[[], None]]]:
    """A chunk behind a past, by name."""
    for case in CASES:
        q_heads, kv_heads, head_dim, dtype, window, softcap, sinks = case
        name = f"{q_heads}/{kv_heads} d{head_dim} long {dtype} window {window} softcap {softcap} {sinks=}"
        yield name, partial(_launch, *case)


def runs() -> Iterator[tuple[str, Callable[[], None]]]:
    """Decodes with up to three and seven drafts, by name."""
    for q_heads, kv_heads, head_dim, dtype, window, softcap, sinks in (*CASES, WIDE):
        for run in (4, 8) if head_dim <= 128 else (4,):
            name = f"{q_heads}/{kv_heads} d{head_dim} {run=} {dtype} window {window} softcap {softcap} {sinks=}"
            yield name, partial(_launch_runs, q_heads, kv_heads, head_dim, dtype, window, softcap, sinks, run)


def few() -> Iterator[tuple[str, Callable[[], None]]]:
    """Few tokens behind a long past, where they have a launch shape of their own, by name."""
    for q_heads, kv_heads, head_dim, dtype, window, softcap, sinks in (*CASES, WIDE):
        device = torch.device("meta")
        shape = AttentionShape(q_heads, kv_heads, head_dim, 2, frozenset({window}), capability=capability_of(device))
        if shape.packs_few:
            name = f"{q_heads}/{kv_heads} d{head_dim} few {dtype} window {window} softcap {softcap} {sinks=}"
            yield name, partial(_launch_few, shape, dtype, window, softcap, sinks)


def _launch_few(shape: AttentionShape, dtype: torch.dtype, window: int, softcap: float, sinks: bool) -> None:
    plan = plan_attention(meta(0), meta(0), shape, Spans(shape.few(), meta(33, 5), meta(12, 4)))
    paged_attention(
        meta(32, shape.q_heads, shape.head_dim, dtype=dtype), *meta_cache(dtype, shape.kv_heads, shape.head_dim)[:2],
        slots=meta(16), query_start=meta(17), context_lens=meta(16), block_tables=meta(64, 512), scale=0.1,
        num_decodes=0, sliding_window=window, softcap=softcap,
        sinks=meta(shape.q_heads, dtype=torch.float32) if sinks else None, plan=plan,
    )  # fmt: skip


def _launch_runs(
    q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int, softcap: float, sinks: bool, run: int
) -> None:
    shape = AttentionShape(q_heads, kv_heads, head_dim, 2, frozenset({window}), run=run)
    plan = plan_attention(meta(8), meta(8), shape, query_start=meta(9))
    paged_attention(
        meta(8 * run, q_heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :q_heads],
        *meta_cache(dtype, kv_heads, head_dim)[:2],
        slots=meta(8), query_start=meta(9), context_lens=meta(8), block_tables=meta(64, 512), scale=0.1, num_decodes=0,
        sliding_window=window, softcap=softcap, sinks=meta(q_heads, dtype=torch.float32) if sinks else None, plan=plan,
    )  # fmt: skip


def _launch_form(cache_dtype: torch.dtype, form: DecodeForm) -> None:
    config = AttentionShape(32, 2, 128, 2, float8=cache_dtype.itemsize == 1).decodes(132, form=form)
    plan = plan_decodes(meta(64), meta(64), 32, 2, 128, config, 0, settled=True)
    *caches, scales = meta_cache(cache_dtype, 2, 128)
    rotary_attention(
        meta(64, 36, 128, dtype=torch.bfloat16), meta(4096, 128, dtype=torch.float32), *caches, slots=meta(64),
        context_lens=meta(64), block_tables=meta(64, 512), scale=0.1, kv_scales=scales, plan=AttentionPlan({0: plan}),
    )  # fmt: skip


def _launch(
    q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int, softcap: float, sinks: bool
) -> None:
    cache = meta(1024, 2, 2, 16, kv_heads, head_dim, dtype=dtype)
    queries = meta(4096, q_heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :q_heads]
    hopper_attention(
        queries, cache[:, 1, 0], cache[:, 1, 1], meta(4096, q_heads, head_dim, dtype=dtype), meta(1), meta(64, 512),
        0.1, [LongRow(0, 0, 4096, 8192)], sliding_window=window, softcap=softcap,
        sinks=meta(q_heads, dtype=torch.float32) if sinks else None,
    )  # fmt: skip
