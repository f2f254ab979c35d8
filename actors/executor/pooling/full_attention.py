"""Attention of encoders: each token sees all tokens of its own prompt, those behind it too. Nothing is cached."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

HALVES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
_varlen = torch.ops.aten._flash_attention_forward
"""What `torch.nn.attention.varlen` calls, without its imports (the compiler's, of seconds) and its checks."""


def takes_any_lengths(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether CUDA attends to rows of any lengths at once, from lengths on the device: a graph holds that."""
    return dtype in HALVES and head_dim % 8 == 0 and head_dim <= LARGEST_HEAD


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """q, k, v [T, heads, D] of rows that begin at ``query_start`` [R + 1] int32, none of more than ``longest`` tokens
    -> [T, heads, D]. Tokens behind the last row get anything. On CUDA nothing waits for the device."""
    if q.device.type == "meta":
        return torch.empty_like(q)
    if q.device.type == "cpu":
        return _row_by_row(q, k, v, query_start, scale)
    if takes_any_lengths(q.dtype, q.shape[2]):
        rows = query_start, query_start, longest, longest
        found: torch.Tensor = _varlen(q, k, v, *rows, 0.0, False, False, scale=scale)[0]
        return found
    return _padded(q, k, v, query_start, longest, scale)


def _row_by_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, scale: float
) -> torch.Tensor:
    out = torch.empty_like(q)
    for first, end in pairwise(query_start.tolist()):
        queries, keys, values = (each[first:end].transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        out[first:end] = F.scaled_dot_product_attention(queries, keys, values, scale=scale)[0].transpose(0, 1)
    return out


def _padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """For formats that the varlen kernel does not take: rows padded to the longest."""
    starts, lengths = query_start[:-1].long(), query_start.diff().long()
    places = torch.arange(longest, device=q.device)
    there = places < lengths[:, None]
    index = (starts[:, None] + places).clamp_(max=len(q) - 1)
    queries, keys, values = (each[index].transpose(1, 2) for each in (q, k, v))
    mask = there[:, None, None, :]
    found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale).transpose(1, 2)
    tokens = torch.arange(len(q), device=q.device)
    row = torch.searchsorted(query_start[1:].long(), tokens, right=True)
    return found[row, tokens - starts[row]]
