"""Attention of a pass's new tokens over latents: decodes and prompts, each with their kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.paged_attention import AttentionPlan
from pagebus.kernels.latent.decode import latent_decodes
from pagebus.kernels.latent.prefill import latent_prefills
from pagebus.kernels.latent.shape import LatentShape


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    *,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    num_decodes: int,
    plan: AttentionPlan,
    decode_lens: torch.Tensor | None = None,
    long_rows: Sequence[LongRow] = (),
    invariant: bool = False,
) -> torch.Tensor:
    """Attended latents [T, H, K] of queries q [T, H, K] and q_rope [T, H, R] over a layer's cache [num_blocks,
    block_size, K + R]; all else as in :func:`pagebus.kernels.attention.paged_attention.paged_attention`.

    Queries of ``long_rows``, of which the plan knows nothing, get anything.
    """
    num_decodes = 0 if invariant else num_decodes
    assert cache.dtype == q.dtype
    assert q.stride(2) == q_rope.stride(2) == cache.stride(2) == block_tables.stride(1) == 1
    out = torch.empty_like(q)
    if num_decodes:
        shape = LatentShape(q.shape[1], 1, q.shape[2], q.element_size(), rope_dim=q_rope.shape[2])
        latent_decodes(q, q_rope, cache, out, block_tables, scale, plan.decodes[0], shape)
    if plan.prefills is not None:
        latent_prefills(
            q, q_rope, cache, out, slots, query_start, context_lens, block_tables, scale, plan.prefills
        )  # fmt: skip
    return out


def latent_attention_invariant(*args: Any, **keywords: Any) -> torch.Tensor:
    """`latent_attention` with results independent of other tokens; the plan must come from
    `plan_attention_invariant`."""
    return latent_attention(*args, **keywords, invariant=True)
