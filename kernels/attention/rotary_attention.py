"""Attention of a pass of decodes, directly from the projections.

The decode kernel itself normalizes and rotates the heads, and writes the new keys and values to the cache, in place of
:mod:`pagebus.kernels.layers.rotary_kv_write`.
"""

from __future__ import annotations

import torch

from pagebus.kernels.attention.decode import LEAST_DIM, decode_attention
from pagebus.kernels.attention.paged_attention import AttentionPlan, check_sinks
from pagebus.kernels.attention.reference import paged_attention_reference
from pagebus.kernels.common.int8 import check_scales
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.layers.rotary_kv_write import rotary_kv_write_reference

MOST_ROWS = 64
"""Beyond, two kernels are as fast or faster, as measured on an H200."""


MOST_GROUPED = 16
"""Query heads of a KV head, rotated in registers; more would not fit beside the results."""


def supports(q_heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the kernel takes these heads: halves are padded to a power of two, and tiles to `LEAST_DIM`."""
    return q_heads // kv_heads <= MOST_GROUPED and head_dim % 16 == 0 and next_power_of_2(head_dim) >= LEAST_DIM


def rotary_attention_reference(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Norm and rotate the heads of qkv [R, Hq + 2 Hkv, D], store keys and values, attend -> [R, Hq, D].

    Row r is the newest token of the sequence in slots[r], the last of its context_lens[r] (0: a row of nothing, which
    gives anything). Its key and value go where block_tables say (a negative block: nowhere), a place that no other row
    sees. All else is as in `rotary_kv_write_reference` and `paged_attention`; what becomes of qkv is not said.
    """
    count, block_size = len(slots), k_cache.shape[1]
    positions = (context_lens - 1).clamp_(min=0).long()
    blocks = block_tables[slots.long(), positions // block_size].long()
    stored = (context_lens > 0) & (blocks >= 0)
    mapping = torch.where(stored, blocks * block_size + positions % block_size, -1)
    q = rotary_kv_write_reference(
        qkv, positions, cos_sin, k_cache, v_cache, mapping, q_norm=q_norm, k_norm=k_norm, eps=eps, kv_scales=kv_scales
    )
    return paged_attention_reference(
        q, k_cache, v_cache, slots=slots, query_start=torch.arange(count + 1, dtype=torch.int32, device=q.device),
        context_lens=context_lens, block_tables=block_tables, scale=scale, num_decodes=count,
        sliding_window=sliding_window, softcap=softcap, sinks=sinks, kv_scales=kv_scales,
    )  # fmt: skip


def rotary_attention(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: AttentionPlan,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """As `rotary_attention_reference`; the plan is `plan_attention`'s of these slots and context_lens."""
    num_rows, num_heads, head_dim = qkv.shape
    kv_heads = k_cache.shape[2]
    q_heads = num_heads - 2 * kv_heads
    assert supports(q_heads, kv_heads, head_dim)
    assert qkv.stride()[1:] == (head_dim, 1)
    assert k_cache.shape == v_cache.shape
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.shape[3] == head_dim == cos_sin.shape[1]
    assert k_cache.stride(3) == 1
    assert cos_sin.is_contiguous()
    assert cos_sin.dtype == torch.float32
    assert block_tables.stride(1) == 1
    assert slots.shape == context_lens.shape == (num_rows,)
    assert (q_norm is None) == (k_norm is None)
    check_scales(k_cache, kv_scales)
    check_sinks(sinks, q_heads)
    out = torch.empty((num_rows, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    decode_attention(
        qkv, k_cache, v_cache, out, block_tables, scale, sliding_window, plan.decodes[sliding_window],
        softcap=softcap, sinks=sinks, kv_scales=kv_scales, cos_sin=cos_sin, q_norm=q_norm, k_norm=k_norm, eps=eps,
    )  # fmt: skip
    return out
