"""Launches of the largest steps that `--max-num-batched-tokens` allows: tokens are counted where grids have room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from pagebus.kernels.attention.paged_attention import (
    AttentionShape,
    Spans,
    paged_attention_invariant,
    plan_attention_invariant,
)
from pagebus.kernels.attention.prefill import PrefillPlan
from pagebus.kernels.coded.rounding import round_tokens, scale_sums
from pagebus.kernels.latent.head_product import head_product
from pagebus.kernels.latent.prefill import latent_prefills
from pagebus.kernels.latent.shape import LatentShape
from pagebus.kernels.latent.write import latent_write
from pagebus.kernels.layers.rotary_kv_write import rotary_kv_write_invariant
from pagebus.kernels.lora.embedding import add_to_embedding
from pagebus.kernels.moe.activation import Gate
from pagebus.kernels.moe.adapted.gates import gate_rows
from pagebus.kernels.moe.grouped import combine
from pagebus.kernels.moe.hopper_experts import gather_pairs
from pagebus.kernels.moe.routing import Routing, route
from pagebus.kernels.moe.shared import add_shared
from pagebus.kernels.moe.sorting import sort_pairs
from pagebus.kernels.sampling.sampling import sample
from pagebus.kernels.specialized.split_sums import add_splits
from tests.kernels.attention.launches import meta
from tests.kernels.lora.launches import meta_plan, meta_table

TOKENS = 2**20
"""The most that the setting may be, ``high`` in `pagebus.actors.settings.engine`."""
MOST_PROGRAMS = 2**31 - 1, 65535, 65535
"""Of CUDA, in each dimension of a grid."""
BF16, FP32 = torch.bfloat16, torch.float32


def write_latents() -> None:
    product = meta(TOKENS, 16 * 192 + 576, dtype=BF16)
    latent_write(
        product[:, :3072].view(TOKENS, 16, 192), product[:, 3072:], meta(TOKENS), meta(4096, 64, dtype=FP32),
        meta(1024, 16, 576, dtype=BF16), meta(TOKENS, dtype=torch.int64), norm=meta(512, dtype=BF16), eps=1e-6,
    )  # fmt: skip


def write_heads() -> None:
    """With ``--deterministic``, where programs have the same heads for any number of tokens."""
    cache = meta(1024, 16, 8, 128, dtype=BF16)
    rotary_kv_write_invariant(
        meta(TOKENS, 48, 128, dtype=BF16), meta(TOKENS), meta(4096, 128, dtype=FP32), cache, cache,
        meta(TOKENS, dtype=torch.int64),
    )  # fmt: skip


def attend_prompts() -> None:
    """With ``--deterministic``, where a span has few queries if many heads share keys."""
    shape, cache = AttentionShape(128, 8, 128, 2), meta(1024, 16, 8, 128, dtype=BF16)
    spans = meta(TOKENS // shape.alone().block_queries, 5)
    paged_attention_invariant(
        meta(TOKENS, 128, 128, dtype=BF16), cache, cache, slots=meta(8), query_start=meta(9), context_lens=meta(8),
        block_tables=meta(64, 512), scale=0.1, num_decodes=0,
        plan=plan_attention_invariant(meta(0), meta(0), shape, Spans(shape.alone(), spans, meta(0, 4))),
    )  # fmt: skip


def sample_drafts() -> None:
    """Behind each token of as many sequences as there may be, with as many drafts."""
    rows = 17 * 8192
    ints, floats = meta(rows), meta(rows, dtype=FP32)
    sample(
        meta(rows, 128256, dtype=FP32), ints, floats, ints, floats, floats, meta(rows, dtype=torch.int64), ints,
        any_random=True, any_truncation=True,
    )  # fmt: skip


def attend_latents() -> None:
    """With ``--deterministic``, where no prompt is expanded."""
    shape = LatentShape(128, 1, 512, 2, rope_dim=64)
    plan = PrefillPlan(shape.prompts(0, 0), meta(TOKENS, 5), meta(0, 4), None, None)
    q = meta(TOKENS, 128, 512, dtype=BF16)
    latent_prefills(
        q, meta(TOKENS, 128, 64, dtype=BF16), meta(1024, 16, 576, dtype=BF16), q, meta(8), meta(9), meta(8),
        meta(64, 512), 0.1, plan,
    )  # fmt: skip


def multiply_heads() -> None:
    head_product(meta(TOKENS, 128, 128, dtype=BF16), meta(128, 128, 512, dtype=BF16))


def sort_and_combine() -> None:
    experts, weights = meta(TOKENS, 8), meta(TOKENS, 8, dtype=FP32)
    pairs = sort_pairs(experts, 128, 128)
    gather_pairs(meta(TOKENS, 2048, dtype=BF16), pairs.order, 8)
    gate_rows(meta(8 * TOKENS, 1536, dtype=BF16), Gate())
    combine(meta(TOKENS, 8, 2048, dtype=BF16), weights, experts)


def share_and_route() -> None:
    add_shared(meta(TOKENS, 2048, dtype=BF16), meta(TOKENS, 2048, dtype=BF16), None)
    route(meta(TOKENS, 128, dtype=BF16), Routing(8))


def round_and_scale() -> None:
    _, scale = round_tokens(meta(TOKENS, 4096, dtype=BF16), torch.int8)
    out = meta(TOKENS, 4096, dtype=BF16)
    scale_sums(meta(TOKENS, 4096), scale, meta(4096, dtype=FP32), None, out)
    add_splits(meta(2, TOKENS, 4096, dtype=FP32), None, out)


def adapt_embeddings() -> None:
    add_to_embedding(meta(TOKENS), meta_table((4096,), 1), meta_plan(TOKENS), meta(TOKENS, 4096, dtype=BF16))


@pytest.mark.parametrize(
    "launch",
    [write_heads, write_latents, attend_prompts, attend_latents, sample_drafts, multiply_heads, sort_and_combine,
     share_and_route, round_and_scale, adapt_embeddings],
)  # fmt: skip
def test_grids_have_room_for_the_largest_step(launch: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first dimension holds 2^31 - 1 programs, the others 65535."""
    grids: list[tuple[str, tuple[int, ...]]] = []

    def keep(kernel: Any, *args: object, grid: tuple[int, ...], warmup: bool, **kwargs: object) -> None:
        grids.append((kernel.fn.__name__, grid))

    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", keep)
    launch()
    assert grids
    for name, grid in grids:
        assert all(0 < programs <= most for programs, most in zip(grid, MOST_PROGRAMS, strict=False)), (name, grid)
