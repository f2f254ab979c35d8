"""How one forward pass attends: made once per pass for the path that was chosen, and used by all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.kernels.attention.paged_attention import AttentionPlan, AttentionShape

Pages: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""A layer's part of the cache: keys and values [num_blocks, block_size, Hkv, D], and by what they are divided, if they
are: see :func:`pagebus.kernels.attention.paged_attention.paged_attention`."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention of a layer is, but for its weights.

    ``sizes`` are the numbers of query, key and value heads; scores are multiplied by ``scale``; a query sees ``window``
    tokens (0: all, below 0: chunks, as of :mod:`pagebus.kernels.common.reach`); ``softcap`` c makes each score
    c tanh(s / c), 0: it does not; ``sinks`` [Hq] float32 are as of
    :func:`pagebus.kernels.attention.paged_attention.paged_attention`. ``cos_sin`` is the table of
    :func:`pagebus.actors.executor.layers.rotary.rotary_table`. ``q_norm`` and ``k_norm`` [D], with ``eps``, are there
    where queries and keys are normalised head by head.
    """

    sizes: tuple[int, int, int]
    head_dim: int
    scale: float
    window: int
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    expansion: torch.Tensor | None = None
    """Of latent attention: what makes a head's own part of the key, and its value, of a latent [H, N + V, K]."""
    page: int = 0
    """Which of a block's pages the layer lies in (:class:`pagebus.actors.model.cache_groups.CacheGroups`)."""


class AttentionPass(Protocol):
    """One pass's way to read the cache."""

    stores: bool
    """Whether it normalises, rotates and stores heads itself; otherwise that is done before."""

    def attend(self, qkv: torch.Tensor, pages: Pages, heads: Heads) -> torch.Tensor:
        """Queries, keys and values [T, Hq + 2 Hkv, D] of a layer -> [T, Hq, D]. If the pass ``stores``, they are as
        the projections left them; otherwise rotated, and in the cache."""
        ...


class PagedPass:
    """Decodes and prompts over what is in the cache, each by their kernels."""

    stores = False

    def __init__(
        self, ops: Ops, shape: AttentionShape, batch: AttentionBatch, plan: AttentionPlan | None = None
    ) -> None:
        self._ops = ops
        self._batch = batch
        if plan is None:
            count, lens = batch.num_decodes, batch.context_lens if batch.decode_lens is None else batch.decode_lens
            plan = ops.plan_attention(batch.slots[:count], lens[:count], shape, batch.spans)
        self._plan = plan

    def attend(self, qkv: torch.Tensor, pages: Pages, heads: Heads) -> torch.Tensor:
        batch, (k_cache, v_cache, kv_scales) = self._batch, pages
        q, k, v = qkv.split_with_sizes(heads.sizes, dim=1)
        return self._ops.paged_attention(
            q,
            k_cache,
            v_cache,
            slots=batch.slots,
            query_start=batch.query_start,
            context_lens=batch.context_lens,
            block_tables=batch.table_of(heads.page),
            scale=heads.scale,
            num_decodes=batch.num_decodes,
            sliding_window=heads.window,
            softcap=heads.softcap,
            sinks=heads.sinks,
            decode_lens=batch.decode_lens,
            kv_scales=kv_scales,
            plan=self._plan,
            long_rows=batch.long_rows,
            projected=(k, v),
        )


class RunsPass(PagedPass):
    """Rows of a few tokens each, in one kernel: decodes with drafts, and without."""

    def __init__(self, ops: Ops, shape: AttentionShape, batch: AttentionBatch) -> None:
        plan = ops.plan_attention(batch.slots, batch.context_lens, shape, query_start=batch.query_start)
        super().__init__(ops, shape, replace(batch, num_decodes=0, decode_lens=None), plan)


class FusedDecodePass:
    """Decodes alone, by one kernel that begins with what the projections left."""

    stores = True

    def __init__(self, ops: Ops, shape: AttentionShape, batch: AttentionBatch) -> None:
        self._ops = ops
        self._batch = batch
        self._plan = ops.plan_attention(batch.slots, batch.context_lens, shape)

    def attend(self, qkv: torch.Tensor, pages: Pages, heads: Heads) -> torch.Tensor:
        batch, (k_cache, v_cache, kv_scales) = self._batch, pages
        return self._ops.rotary_attention(
            qkv,
            heads.cos_sin,
            k_cache,
            v_cache,
            slots=batch.slots,
            context_lens=batch.context_lens,
            block_tables=batch.table_of(heads.page),
            scale=heads.scale,
            plan=self._plan,
            sliding_window=heads.window,
            softcap=heads.softcap,
            sinks=heads.sinks,
            kv_scales=kv_scales,
            q_norm=heads.q_norm,
            k_norm=heads.k_norm,
            eps=heads.eps,
        )
