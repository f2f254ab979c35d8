"""Random problems of attention over a paged cache of latents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

NO_SUCH_BLOCK = 1 << 29  # in unused block table entries: following one is a fault, not a wrong number


@dataclass(frozen=True, slots=True)
class LatentCase:
    """Queries [T, H, N + R], one layer's cache [num_blocks, block_size, K + R], an expansion [H, N + V, K], and the
    arguments that say which rows there are."""

    q: torch.Tensor
    cache: torch.Tensor
    expansion: torch.Tensor
    rows: dict[str, Any]
    nope: int
    context_lens: list[int]
    query_lens: list[int]

    @property
    def absorbed(self) -> torch.Tensor:
        """Queries in the space of latents, [T, H, K]."""
        return torch.einsum("thn,hnk->thk", self.q[..., : self.nope], self.expansion[:, : self.nope]).to(self.q.dtype)

    def attended(self) -> torch.Tensor:
        """The definition, row by row, in float64: attended latents [T, H, K] of rows with a context, others zeros."""
        rank, starts = self.expansion.shape[2], self.rows["query_start"].tolist()
        q = torch.cat((self.absorbed, self.q[..., self.nope :]), 2).double()
        out = torch.zeros(*self.q.shape[:2], rank, dtype=torch.float64, device=q.device)
        for row, (length, count) in enumerate(zip(self.context_lens, self.query_lens, strict=True)):
            table, size = self.rows["block_tables"][self.rows["slots"][row]].tolist(), self.cache.shape[1]
            for query in range(count if length else 0):
                seen = length - count + query + 1
                keys = torch.stack([self.cache[table[at // size], at % size] for at in range(seen)]).double()
                token = starts[row] + query
                weights = torch.softmax(q[token] @ keys.T * self.rows["scale"], 1)
                out[token] = weights @ keys[:, :rank]
        return out

    def values(self) -> torch.Tensor:
        """Attended values [T, H, V]."""
        return torch.einsum("thk,hvk->thv", self.attended(), self.expansion[:, self.nope :].double())


def make_latents(
    context_lens: list[int], query_lens: list[int], *, heads: int, rank: int, nope: int, rope: int, value: int,
    block_size: int = 16, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
) -> LatentCase:  # fmt: skip
    """Rows with these lengths; leading ones with one query are decodes. Every element of the cache that is no row's
    context is NaN; queries are a view of what a product gives, the cache one layer of three."""
    num_rows, num_tokens = len(context_lens), sum(query_lens)
    num_decodes = next((row for row, count in enumerate(query_lens) if count != 1), num_rows)
    widest = max(1, *(-(-length // block_size) for length in context_lens))
    num_slots, num_blocks = num_rows + 2, num_rows * widest + 3
    cache = torch.full((num_blocks, 3, 1, block_size, 1, rank + rope), math.nan, device=device).to(dtype)
    tables = torch.full((num_slots, widest), NO_SUCH_BLOCK, dtype=torch.int32, device=device)
    slots = torch.randperm(num_slots)[:num_rows].to(device=device, dtype=torch.int32)
    blocks = torch.randperm(num_blocks).to(device=device, dtype=torch.int32)
    for row, length in enumerate(context_lens):
        used = -(-length // block_size)
        mine = blocks[row * widest : row * widest + used]
        tables[slots[row], :used] = mine
        values = torch.randn(used * block_size, 1, rank + rope, device=device)
        values[length:] = math.nan
        cache[mine.long(), 1, 0] = values.to(dtype).view(used, block_size, 1, rank + rope)
    product = torch.randn(num_tokens, heads * (nope + rope) + rank + rope, device=device).to(dtype)
    ints = {"dtype": torch.int32, "device": device}
    rows = {
        "slots": slots,
        "query_start": torch.tensor([0, *query_lens]).cumsum(0).to(**ints),
        "context_lens": torch.tensor(context_lens, **ints),
        "block_tables": tables,
        "scale": (nope + rope) ** -0.5,
        "num_decodes": num_decodes,
    }
    q = product[:, : heads * (nope + rope)].view(num_tokens, heads, nope + rope)
    expansion = (torch.randn(heads, nope + value, rank, device=device) * rank**-0.5).to(dtype)
    return LatentCase(q, cache[:, 1, 0, :, 0], expansion, rows, nope, context_lens, query_lens)
