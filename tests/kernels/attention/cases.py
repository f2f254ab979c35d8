"""Random attention problems over a paged cache, and an obvious way to solve them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pagebus.kernels.common.float8 import FLOAT8
from pagebus.kernels.common.int8 import block_bytes, from_int8_reference, split_blocks, to_int8_reference
from pagebus.kernels.common.reach import first_seen_reference

NO_SUCH_BLOCK = 1 << 29  # in unused block table entries: following one is a fault, not a wrong number


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Arguments of one paged_attention call, and the ragged lengths they were made of."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    keywords: dict[str, Any]
    context_lens: list[int]
    query_lens: list[int]

    def projected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the new tokens, as the projections leave them beside the queries."""
        tables, block_size, places = self.keywords["block_tables"], self.k_cache.shape[1], []
        for slot, count, context in zip(
            self.keywords["slots"].tolist(), self.query_lens, self.context_lens, strict=True
        ):
            position = torch.arange(context - count, context, device=self.q.device)
            places.append(torch.stack((tables[slot].long()[position // block_size], position % block_size)))
        where = tuple(torch.cat(places, 1))
        k, v = torch.cat((self.k_cache[where], self.v_cache[where]), 1).chunk(2, 1)
        return k, v

    def live(self) -> list[int]:
        """The tokens whose results mean something: those of rows with a context."""
        row_of = [row for row, count in enumerate(self.query_lens) for _ in range(count)]
        return [token for token, row in enumerate(row_of) if self.context_lens[row]]


def make_case(
    context_lens: list[int],
    query_lens: list[int],
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> AttentionCase:
    """Rows with these lengths (leading rows with one query are decodes) and `padding` tokens after them.

    ``sinks``: each head has one, some above all scores. Every cache element that no query sees is NaN, or has a scale
    that is; blocks before a row's window are another's. q is a view of a fused qkv, the cache one layer of three; a
    float8 cache comes with scales that make up for its contents, whose size differs from head to head, and one in int8
    with those of its tokens, whose size differs from token to token.
    """
    num_rows, num_tokens = len(context_lens), sum(query_lens) + padding
    num_decodes = next((row for row, length in enumerate(query_lens) if length != 1), num_rows)
    widest = max(1, *(-(-length // block_size) for length in context_lens))
    num_slots, num_blocks = num_rows + 2, num_rows * widest + 3
    fused = torch.randn(num_tokens, (q_heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    cache_dtype = cache_dtype or dtype
    float8, int8 = cache_dtype in FLOAT8, cache_dtype == torch.int8
    scales = 2.0 ** torch.randint(-6, 3, (2, kv_heads), device=device)
    if int8:
        cache, all_scales = int8_cache(num_blocks, block_size, kv_heads, head_dim, device)
        scales = all_scales[1]
    else:
        shape = (num_blocks, 3, 2, block_size, kv_heads, head_dim)
        cache = torch.full(shape, math.nan, device=device).to(cache_dtype)
    tables = torch.full((num_slots, widest), NO_SUCH_BLOCK, dtype=torch.int32, device=device)
    slots = torch.randperm(num_slots)[:num_rows].to(device=device, dtype=torch.int32)
    blocks = torch.randperm(num_blocks).to(device=device, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(context_lens, query_lens, strict=True)):
        used = -(-length // block_size)
        mine = blocks[row * widest : row * widest + used]
        tables[slots[row], :used] = mine
        behind = max(0, int(first_seen_reference(torch.tensor(length - count), window))) if window else 0
        tables[slots[row], : behind // block_size] = blocks[-1]
        for part in range(2):
            values = torch.randn(used * block_size, kv_heads, head_dim, device=device)
            where, whole = mine.long(), (used, block_size, kv_heads, head_dim)
            if int8:
                sizes = 2.0 ** torch.randint(-12 * part - 1, 2, (len(values), kv_heads, 1), device=device)
                cache[where, 1, part], scales[part, where] = to_int8_reference((values * sizes).view(whole), part)
                scales[part, where[-1:], length - (used - 1) * block_size :] = math.nan
                if behind:
                    scales[part, where[: behind // block_size]] = math.nan
                    scales[part, where[behind // block_size], : behind % block_size] = math.nan
                continue
            values[:behind], values[length:] = math.nan, math.nan
            values = values / scales[part].unsqueeze(1) if float8 else values
            cache[where, 1, part] = values.to(cache_dtype).view(whole)
    ends = torch.tensor([0, *query_lens]).cumsum(0)
    return AttentionCase(
        fused.view(num_tokens, -1, head_dim)[:, :q_heads],
        cache[:, 1, 0],
        cache[:, 1, 1],
        {
            "slots": slots,
            "query_start": ends.to(device=device, dtype=torch.int32),
            "context_lens": torch.tensor(context_lens, dtype=torch.int32, device=device),
            "block_tables": tables,
            "scale": head_dim**-0.5,
            "num_decodes": num_decodes,
            "sliding_window": window,
            "softcap": softcap,
            "sinks": torch.randn(q_heads, device=device) * 3 if sinks else None,
            "kv_scales": scales if float8 or int8 else None,
        },
        context_lens,
        query_lens,
    )


def int8_cache(
    num_blocks: int, block_size: int, kv_heads: int, head_dim: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Three layers of any numbers, whose scales are NaN, as `split_blocks` gives them."""
    size = block_bytes(3, block_size, kv_heads, head_dim)
    blocks = torch.randint(-128, 128, (num_blocks, size), dtype=torch.int8, device=device)
    numbers, scales = split_blocks(blocks, 3, kv_heads, head_dim)
    scales.fill_(math.nan)
    return numbers, scales


def naive_attention(case: AttentionCase) -> torch.Tensor:
    """The definition in float64, one query after the other; zeros where a row has no context."""
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=case.q.device)
    block_size, kv_heads = case.k_cache.shape[1:3]
    group, window = case.q.shape[1] // kv_heads, case.keywords["sliding_window"]
    caches, scales = (case.k_cache, case.v_cache), case.keywords["kv_scales"]
    if case.k_cache.dtype == torch.int8:
        caches = tuple(from_int8_reference(caches[part], scales[part], part) for part in range(2))
    elif scales is not None:
        caches = tuple(caches[part].double() * scales[part].double().unsqueeze(1) for part in range(2))
    token = 0
    for row, (length, count) in enumerate(zip(case.context_lens, case.query_lens, strict=True)):
        if length == 0:
            token += count
            continue
        table = case.keywords["block_tables"][case.keywords["slots"][row]].tolist()
        index = torch.tensor([(table[p // block_size], p % block_size) for p in range(length)]).unbind(1)
        k, v = (cache[index].double().repeat_interleave(group, 1) for cache in caches)
        for position in range(length - count, length):
            first = max(0, position - window + 1) if window > 0 else position - position % -window if window else 0
            seen = slice(first, position + 1)
            scores = torch.einsum("hd,phd->hp", case.q[token].double(), k[seen]) * case.keywords["scale"]
            softcap = case.keywords["softcap"]
            scores = (scores / softcap).tanh() * softcap if softcap else scores
            if case.keywords["sinks"] is not None:
                weights = torch.cat((scores, case.keywords["sinks"].double().unsqueeze(1)), 1).softmax(-1)[:, :-1]
            else:
                weights = scores.softmax(-1)
            out[token] = torch.einsum("hp,phd->hd", weights, v[seen])
            token += 1
    return out
