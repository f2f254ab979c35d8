"""Paged attention on a CPU in float32, without copying the cache.

A decode step reads every key and value once, so on a CPU the copies that a gather makes would cost more than the rest
of the step. Instead, each block of the cache is a matrix in a batched product, where it lies: a (row, block) pair gives
scores [G, block_size] for the G query heads that share a key head; a softmax over all pairs of a row follows, and
batched products with the values give parts that are summed by row. Where the rows' blocks lie scattered over the cache,
or are shared, the pairs' blocks are gathered after all. Rows with several queries go to the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.layers.attention_pass import Heads, Pages
from pagebus.kernels.attention.reference import Scores
from pagebus.kernels.common.reach import first_seen_reference

MASKED = -1e30
"""Finite, so that a block without a single visible place gives weights of 0, not NaN."""

PLAIN = Scores(0.0, None)

SPARSEST = 2.5
"""Blocks from the lowest to the highest in use, per block in use, up to which reading them all beats a gather."""


class Scratch:
    """Float32 memory that is kept from pass to pass: taking megabytes anew costs more than filling them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] with whatever is in it; the same memory at each call."""
        if self._memory.numel() < rows * columns:
            self._memory = torch.empty(rows * columns * 5 // 4)
        return self._memory[: rows * columns].view(rows, columns)


@dataclass(slots=True)
class Pairs:
    """P (row, block) pairs. ``rows`` [P]; ``bias`` [P, 1, block_size] hides places; ``by_row`` [<= P] lists the pairs
    row by row and ``row_starts`` [R] where each row begins in it. Pair p's block is ``first + p`` of the cache, or
    ``blocks[p]`` if that is given."""

    rows: torch.Tensor
    bias: torch.Tensor
    by_row: torch.Tensor
    row_starts: torch.Tensor
    first: int
    blocks: torch.Tensor | None

    def of(self, cache: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """The pairs' blocks [P, block_size, Hkv, D] of a layer's cache, good until the next call."""
        if self.blocks is None:
            return cache.narrow(0, self.first, len(self.rows))
        matrix = cache.flatten(1)
        gathered = scratch.take(len(self.rows), matrix.shape[1])
        torch.index_select(matrix, 0, self.blocks, out=gathered)
        return gathered.view(-1, *cache.shape[1:])


class CpuPass:
    """An :class:`~pagebus.actors.executor.layers.attention_pass.AttentionPass` for float32 on a CPU."""

    stores = False

    def __init__(self, ops: Ops, scratch: Scratch, batch: AttentionBatch) -> None:
        self._ops = ops
        self._scratch = scratch
        self.batch = batch
        self._pairs: dict[tuple[int, int], Pairs] = {}

    def attend(self, qkv: torch.Tensor, pages: Pages, heads: Heads) -> torch.Tensor:
        q, (k_cache, v_cache, kv_scales) = qkv[:, : heads.sizes[0]], pages
        assert kv_scales is None  # a float8 cache is the reference's
        scores = Scores(heads.softcap, heads.sinks)
        return self.attend_queries(q, k_cache, v_cache, heads.scale, heads.window, scores, heads.page)

    def attend_queries(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, window: int,
        scores: Scores = PLAIN, page: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of q [T, Hq, D] over a layer's keys and values in the cache -> [T, Hq, D]."""
        count = self.batch.num_decodes
        if not count:
            return self._refer(q, k_cache, v_cache, scale, window, scores, 0, page)
        decoded = self._decode(q[:count], k_cache, v_cache, scale, window, scores, page)
        if not math.isfinite(decoded.sum().item()):  # unused places of a block may hold NaN, and NaN times 0 is NaN
            return self._refer(q, k_cache, v_cache, scale, window, scores, 0, page)
        if len(q) == count:
            return decoded
        return torch.cat((decoded, self._refer(q, k_cache, v_cache, scale, window, scores, count, page)))

    def _refer(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, window: int, scores: Scores,
        skip: int, page: int,
    ) -> torch.Tensor:  # fmt: skip
        """The reference's answer for all rows but the first ``skip`` decode rows: [T - skip, Hq, D]."""
        batch = self.batch
        return self._ops.paged_attention(
            q[skip:],
            k_cache,
            v_cache,
            slots=batch.slots[skip:],
            query_start=batch.query_start[skip:] - skip,
            context_lens=batch.context_lens[skip:],
            block_tables=batch.table_of(page),
            scale=scale,
            num_decodes=batch.num_decodes - skip,
            sliding_window=window,
            softcap=scores.softcap,
            sinks=scores.sinks,
        )

    def _decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, window: int, how: Scores,
        page: int,
    ) -> torch.Tensor:  # fmt: skip
        """One query per row: q [R, Hq, D] -> [R, Hq, D]."""
        if (key := (page, window)) not in self._pairs:
            self._pairs[key] = self._find_pairs(len(q), k_cache.shape[1], window, page)
        pairs = self._pairs[key]
        num_rows, num_heads, head_dim = q.shape
        kv_heads, num_pairs = k_cache.shape[2], len(pairs.rows)
        if not num_pairs:
            return torch.zeros_like(q)
        grouped = q.reshape(num_rows, -1).index_select(0, pairs.rows).view(num_pairs, kv_heads, -1, head_dim)
        group = num_heads // kv_heads
        weights = q.new_empty(kv_heads, num_pairs, group, k_cache.shape[1])
        keys = pairs.of(k_cache, self._scratch)
        for head in range(kv_heads):
            transposed = keys[:, :, head].transpose(1, 2)
            if how.softcap:
                scores = torch.bmm(grouped[:, head], transposed).mul_(scale / how.softcap).tanh_().mul_(how.softcap)
                torch.add(scores, pairs.bias, out=weights[head])
            else:
                torch.baddbmm(pairs.bias, grouped[:, head], transposed, alpha=scale, out=weights[head])
        sums = self._exponentiate(weights, pairs, num_rows, how.by_group(kv_heads))
        values, out = pairs.of(v_cache, self._scratch), q.new_empty(num_rows, kv_heads, group, head_dim)
        for head in range(kv_heads):
            parts = torch.bmm(weights[head], values[:, :, head]).view(num_pairs, -1)
            total = F.embedding_bag(pairs.by_row, parts, pairs.row_starts, mode="sum")
            torch.div(total.view(num_rows, group, head_dim), sums[head].unsqueeze(2), out=out[:, head])
        return out.view(num_rows, num_heads, head_dim)

    @staticmethod
    def _exponentiate(weights: torch.Tensor, pairs: Pairs, num_rows: int, sinks: torch.Tensor | None) -> torch.Tensor:
        """Scores [Hkv, P, G, block_size] become exp(score - the row's highest), in place; their sums [Hkv, R, G], with
        the ``sinks`` [Hkv, G], if there are any."""
        kv_heads, num_pairs, group, _ = weights.shape
        highest = weights.amax(3).transpose(0, 1).reshape(num_pairs, -1)
        index = pairs.rows.unsqueeze(1).expand_as(highest)
        of_row = highest.new_full((num_rows, highest.shape[1]), MASKED).scatter_reduce_(0, index, highest, "amax")
        highest = of_row.index_select(0, pairs.rows).view(num_pairs, kv_heads, group).transpose(0, 1)
        weights.sub_(highest.unsqueeze(3)).exp_()
        parts = weights.sum(3).transpose(0, 1).reshape(num_pairs, -1)
        sums = F.embedding_bag(pairs.by_row, parts, pairs.row_starts, mode="sum")
        if sinks is not None:
            sums += (sinks.flatten() - of_row).exp()
        # A row without context has no pairs; it gives zeros.
        return sums.clamp_(min=torch.finfo(sums.dtype).tiny).view(num_rows, kv_heads, group).transpose(0, 1)

    def _find_pairs(self, num_rows: int, block_size: int, window: int, page: int) -> Pairs:
        """The blocks that each decode row sees."""
        batch = self.batch
        lens = batch.context_lens[:num_rows].long()
        starts = first_seen_reference(lens - 1, window).clamp_(min=0) if window else torch.zeros_like(lens)
        first = starts // block_size
        counts = (lens + block_size - 1) // block_size - first
        ends = counts.cumsum(0)
        rows = torch.repeat_interleave(counts)
        number = torch.arange(len(rows)) - (ends - counts - first).index_select(0, rows)  # in the row's block table
        blocks = batch.table_of(page)[batch.slots[:num_rows].long().index_select(0, rows), number].long()
        places = number.unsqueeze(1) * block_size + torch.arange(block_size)
        seen = (places < lens[rows].unsqueeze(1)) & (places >= starts[rows].unsqueeze(1))
        bias = torch.where(seen, 0.0, MASKED).unsqueeze(1)
        pairs = Pairs(rows, bias, torch.arange(len(rows)), ends - counts, 0, blocks)
        return self._in_place(pairs, blocks) if len(rows) else pairs

    @staticmethod
    def _in_place(pairs: Pairs, blocks: torch.Tensor) -> Pairs:
        """The same pairs in the order of their blocks, with hidden ones for the gaps, if there are few gaps and no
        block occurs twice; else the pairs as they are."""
        lowest, highest = (int(value) for value in blocks.aminmax())
        span = highest - lowest + 1
        if span > SPARSEST * len(blocks) + 8:
            return pairs
        places = blocks - lowest
        owner = torch.full((span,), -1).index_copy_(0, places, torch.arange(len(blocks)))
        owned = owner >= 0
        if int(owned.sum()) < len(blocks):
            return pairs
        owner.clamp_(min=0)
        rows = pairs.rows.index_select(0, owner)
        bias = pairs.bias.index_select(0, owner).masked_fill_(~owned.view(-1, 1, 1), MASKED)
        return Pairs(rows, bias, places, pairs.row_starts, lowest, None)
