"""Attention over latents in plain torch: the definition of the kernels, and the executor's path on a CPU.

A token's entry in the cache is its latent c [K], normed, and behind it the rotated key r [R] that all heads share. Head
h scores a key by q . c + p . r, where q [K] is its query through the head's part of the expansion (`head_product`) and
p [R] the query's rotated part; the attended latents become values through the other part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.layers.norm import rms_norm_reference
from pagebus.kernels.layers.rotary_kv_write import rotate_reference


def head_product_reference(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, H, A] times each head's matrix, weight [H, A, B] -> [T, H, B], or into ``out``. All may be strided."""
    product = torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    return product if out is None else out.copy_(product)


def latent_write_reference(
    q: torch.Tensor,
    latents: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
) -> None:
    """Rotate the last R numbers of each head's query in q [T, H, N + R] in place; norm the first K numbers of latents
    [T, K + R], rotate the others, and store both in the cache, a strided view [num_blocks, block_size, K + R] of one
    layer.

    positions [T] integers, cos_sin [max_position, R] float32: cos | sin. slot_mapping [T] int64 is block * block_size +
    offset, or negative: the token is not stored. norm [K]: weights of an RMS norm. ``latents`` stay as they are.
    """
    rank, turned = len(norm), cos_sin.shape[1]
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    q[..., -turned:] = rotate_reference(q[..., -turned:], cos, sin)
    key = rotate_reference(latents[:, None, rank:], cos, sin).squeeze(1)
    entries = torch.cat((rms_norm_reference(latents[:, :rank], norm, eps), key), 1)
    kept = slot_mapping >= 0
    places, block_size = slot_mapping[kept], cache.shape[1]
    cache[places // block_size, places % block_size] = entries[kept].to(cache.dtype)


def latent_attention_reference(
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
    decode_lens: torch.Tensor | None = None,
    plan: object = None,
    long_rows: object = (),
) -> torch.Tensor:
    """Attended latents [T, H, K] of queries q [T, H, K] and q_rope [T, H, R] over a layer's cache [num_blocks,
    block_size, K + R]; all else as in :func:`pagebus.kernels.attention.paged_attention.paged_attention`.

    ``plan`` and ``long_rows`` are for the kernels only.
    """
    if decode_lens is not None:
        num_decodes = int((decode_lens > 0).sum())
    rank = q.shape[2]
    whole, out = torch.cat((q, q_rope.to(q.dtype)), 2), torch.zeros_like(q)
    starts, lens = query_start.tolist(), context_lens.tolist()
    live = [row for row in range(num_decodes) if lens[row] > 0]
    if live:
        rows = torch.tensor(live, device=q.device)
        keys = _gather(cache, block_tables[slots[rows].long()], context_lens[rows], max(lens[row] for row in live))
        seen = torch.arange(keys.shape[1], device=q.device) < context_lens[rows].unsqueeze(1)
        out[rows] = _attend(whole[rows], keys.to(q.dtype), seen.unsqueeze(1), rank, scale)
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        if row >= num_decodes and end > start and lens[row] > 0:
            keys = _gather(cache, block_tables[slots[row].long()][None], context_lens[row : row + 1], lens[row])
            out[start:end] = _attend_prompt(whole[start:end], keys[0].to(q.dtype), rank, scale)
    return out


def expanded_attention_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    expansion: torch.Tensor,
    out: torch.Tensor,
    *,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    rows: Sequence[LongRow],
) -> None:
    """The same attention of ``rows`` by keys and values that latents are expanded to: ordinary attention of q [T, H, N
    + R], rotated, into ``out`` [T, H, V]; other tokens stay. expansion [H, N + V, K]: what makes the first N numbers of
    a head's key, and its value, of a latent."""
    heads, both, rank = expansion.shape
    nope = both - out.shape[2]
    for row in rows:
        lens = torch.tensor([row.context_len], device=q.device)
        table = block_tables[slots[row.row].long()][None]
        entries = _gather(cache, table, lens, row.context_len)[0].to(q.dtype)
        made = F.linear(entries[:, :rank], expansion.flatten(0, 1)).view(-1, heads, both)
        shared = entries[:, None, rank:].expand(-1, heads, -1)
        key, value = torch.cat((made[..., :nope], shared), 2), made[..., nope:]
        seen = _causal(row.num_queries, row.context_len, q.device)
        queries = q[row.tokens].transpose(0, 1)
        out[row.tokens] = F.scaled_dot_product_attention(
            queries, key.transpose(0, 1), value.transpose(0, 1), attn_mask=seen, scale=scale
        ).transpose(0, 1)


def _gather(cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, length: int) -> torch.Tensor:
    """The entries of some rows, table [B, MB] -> [B, length, K + R]; zeros past a row's end."""
    block_size = cache.shape[1]
    first = torch.arange(-(-length // block_size), device=cache.device) * block_size  # of each block
    blocks = torch.where(first < lens.unsqueeze(1), table[:, : len(first)], table[:, :1]).long().clamp_(min=0)
    tokens = cache[blocks].flatten(1, 2)[:, :length]
    beyond = torch.arange(length, device=cache.device) >= lens.unsqueeze(1)
    return tokens.masked_fill(beyond.unsqueeze(2), 0.0)


def _attend(q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """q [B, N, K + R] over keys [B, L, K + R], of which those ``seen`` [B, N or 1, L] count -> [B, N, K]."""
    return F.scaled_dot_product_attention(q, keys, keys[..., :rank], attn_mask=seen, scale=scale)


def _attend_prompt(q: torch.Tensor, keys: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """The last N tokens of a row, q [N, H, K + R], over keys [L, K + R] -> [N, H, K]."""
    seen = _causal(len(q), len(keys), q.device)
    attended = _attend(q.transpose(0, 1), keys.expand(q.shape[1], -1, -1), seen, rank, scale)
    return attended.transpose(0, 1)


def _causal(count: int, length: int, device: torch.device) -> torch.Tensor:
    """Which of ``length`` keys the last ``count`` tokens see: [count, length]."""
    return torch.arange(length, device=device) <= torch.arange(length - count, length, device=device).unsqueeze(1)
