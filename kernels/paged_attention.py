"""Attention of a pass's new tokens over the paged cache: decode rows and prefill rows, each by its own kernel."""

from __future__ import annotations

import torch

from kernels.attention_decode import decode_attention
from kernels.attention_prefill import prefill_attention
from kernels.attention_reference import paged_attention_reference

__all__ = ["paged_attention", "paged_attention_reference"]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_query_len: int,
    num_decodes: int,
    max_context_len: int,
    sliding_window: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of new tokens over their sequences' cached tokens, themselves included (they are in the cache already).

    q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D] (views with any block and token stride; Hq a
    multiple of Hkv; any block_size); slots [R] int32; query_start [R + 1] int32; context_lens [R] int32, this pass's
    tokens included; block_tables [S, max_blocks] int32, row = slot. The first num_decodes rows have one query each;
    the others any number up to max_query_len. Query i of n sees keys up to position context_len - n + i, and with a
    sliding_window only that many of them (0: all). -> [T, Hq, D], q's dtype, or `out` when given.

    Rows with context length 0, and tokens after query_start[R], give zeros. max_context_len is an upper bound,
    used to choose a launch shape; block ids past a row's context are never followed, negative ones read block 0.
    """
    num_tokens, q_heads, head_dim = q.shape
    num_rows = slots.shape[0]
    assert k_cache.shape == v_cache.shape
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.shape[3] == head_dim
    assert q_heads % k_cache.shape[2] == 0
    assert q.stride(2) == 1
    assert k_cache.stride(3) == 1
    assert v_cache.stride(3) == 1
    assert block_tables.stride(1) == 1
    assert query_start.shape == (num_rows + 1,)
    assert context_lens.shape == (num_rows,)
    assert 0 <= num_decodes <= min(num_rows, num_tokens)
    if out is None:
        out = torch.empty((num_tokens, q_heads, head_dim), dtype=q.dtype, device=q.device)
    assert out.shape == q.shape
    assert out.stride(2) == 1
    if num_decodes > 0:
        decode_attention(
            q, k_cache, v_cache, out, slots, context_lens, block_tables, num_decodes, scale, sliding_window
        )
    if num_rows > num_decodes:
        prefill_attention(
            q, k_cache, v_cache, out, slots, query_start, context_lens, block_tables, num_decodes, max_query_len,
            max_context_len, scale, sliding_window,
        )  # fmt: skip
    elif num_tokens > num_decodes:
        out[num_decodes:].zero_()
    return out
