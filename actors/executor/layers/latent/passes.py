"""How a pass attends to latents: in their own space, or in that of keys and values for long prompts."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.layers.attention_pass import Heads, Pages
from pagebus.kernels.attention.paged_attention import AttentionShape


class LatentPass:
    """An :class:`~pagebus.actors.executor.layers.attention_pass.AttentionPass` over latents.

    Queries go through the first part of the expansion, attended latents through the second. Rows that are long enough
    have their latents expanded instead.
    """

    stores = False

    def __init__(self, ops: Ops, shape: AttentionShape, batch: AttentionBatch) -> None:
        self._ops, self._batch = ops, batch
        count, lens = batch.num_decodes, batch.context_lens if batch.decode_lens is None else batch.decode_lens
        self._plan = ops.plan_attention(batch.slots[:count], lens[:count], shape, batch.spans)
        self._absorbed: int | None = None
        if batch.long_rows and len(batch.long_rows) == len(batch.slots) - count:  # all prompts
            self._absorbed = count

    def attend(self, qkv: torch.Tensor, pages: Pages, heads: Heads) -> torch.Tensor:
        """Queries [T, heads, N + R] -> [T, heads, V]."""
        batch, expansion, cache = self._batch, heads.expansion, pages[0].squeeze(2)
        assert expansion is not None
        nope = heads.head_dim - heads.cos_sin.shape[1]
        out = qkv.new_empty(len(qkv), len(expansion), expansion.shape[1] - nope)
        count = len(qkv) if self._absorbed is None else self._absorbed
        if count:
            q = qkv[:count]
            attended = self._ops.latent_attention(
                self._ops.head_product(q[..., :nope], expansion[:, :nope]), q[..., nope:], cache, slots=batch.slots,
                query_start=batch.query_start, context_lens=batch.context_lens, block_tables=batch.block_tables,
                scale=heads.scale, num_decodes=batch.num_decodes, decode_lens=batch.decode_lens, plan=self._plan,
                long_rows=batch.long_rows,
            )  # fmt: skip
            self._ops.head_product(attended, expansion[:, nope:].transpose(1, 2), out[:count])
        if batch.long_rows:
            self._ops.expanded_attention(
                qkv, cache, expansion, out, slots=batch.slots, block_tables=batch.block_tables, scale=heads.scale,
                rows=batch.long_rows,
            )  # fmt: skip
        return out
