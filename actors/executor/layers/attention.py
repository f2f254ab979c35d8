"""Attention over the paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from actors.executor.kv_cache import is_float8, layer_pages
from actors.executor.layers.linear import Added, Linear, ResidualLinear
from actors.executor.layers.norm import RMSNorm
from actors.executor.layers.parameters import Parameters
from actors.executor.ops import Ops
from actors.model_config import ModelConfig
from kernels.attention_library import LongRow
from kernels.norm import HalfNorm
from kernels.paged_attention import AttentionShape, Spans
from kernels.rotary_attention import MOST_ROWS, supports


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The N tokens of a pass whose hidden states are wanted, each the newest of its sequence: ``index`` [N] among those
    of the pass, their ``slots`` and ``context_lens`` [N], themselves included. All int32."""

    index: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor


@dataclass(slots=True)
class AttentionBatch:
    """Which tokens of a pass belong to which sequences. R rows, T tokens, S slots.

    ``slots`` [R], ``query_start`` [R + 1], ``context_lens`` [R] (with this pass's tokens) and ``block_tables`` [S, MB]
    are int32, ``slot_mapping`` [T] int64 (block * block_size + offset, -1: not stored). The first ``num_decodes`` rows
    have one token each. ``max_context_len`` is an upper bound. ``spans`` is how the others are cut, if
    there are any. A pass of fixed shape also has ``decode_lens`` [R] int32 (see
    :func:`kernels.paged_attention.paged_attention`).
    """

    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int
    library: tuple[LongRow, ...] = ()
    """Parts of the rows after the decodes that are left to a library, or to our kernel for long prompts
    (`LongRow.own`), as the host knows them; ``spans`` has none of their queries."""
    decode_lens: torch.Tensor | None = None
    spans: Spans | None = None
    last: LastTokens | None = None
    """What the last layer goes on with behind its keys and values; None: all tokens."""

    def of_last_tokens(self, last: LastTokens) -> AttentionBatch:
        """The same pass in which only these tokens attend, as decodes: all before them is in the cache."""
        count = len(last.index)
        return AttentionBatch(
            slots=last.slots,
            query_start=torch.arange(count + 1, dtype=torch.int32, device=last.slots.device),
            context_lens=last.context_lens,
            slot_mapping=self.slot_mapping[:0],  # all are stored
            block_tables=self.block_tables,
            max_query_len=1,
            max_context_len=self.max_context_len,
            num_decodes=count,
        )


def attention_shape(config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype) -> AttentionShape:
    """Of a model that computes in ``dtype``."""
    return AttentionShape(
        config.num_heads, config.num_kv_heads, config.head_dim, dtype.itemsize, frozenset(config.layer_windows),
        float8=cache_dtype.itemsize == 1,
    )  # fmt: skip


class AttentionPass(Protocol):
    """One pass's way to read the cache, made once per pass and used by all layers."""

    batch: AttentionBatch
    writes: bool
    """It is given what the projections left, and puts keys and values into the cache itself."""

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int,
        kv_scales: torch.Tensor | None = None,
        projected: tuple[torch.Tensor, torch.Tensor] | None = None,
        rotary: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Attention of q [T, Hq, D] over a layer's views [num_blocks, block_size, Hkv, D] of the cache -> [T, Hq, D];
        ``window`` 0 is all; ``kv_scales`` and ``projected`` as in
        :func:`kernels.paged_attention.paged_attention`. If it ``writes``, q is [T, Hq + 2 Hkv, D] as projected, and
        ``rotary`` the table and the norms of :func:`kernels.rotary_attention.rotary_attention`."""
        ...


class KernelPass:
    """An :class:`AttentionPass` that calls the device's operations."""

    def __init__(self, ops: Ops, shape: AttentionShape, batch: AttentionBatch) -> None:
        self._ops = ops
        self.batch = batch
        count, lens = batch.num_decodes, batch.context_lens if batch.decode_lens is None else batch.decode_lens
        self._plan = ops.plan_attention(batch.slots[:count], lens[:count], shape, batch.spans)
        alone = batch.spans is None and batch.last is None and count == len(batch.slot_mapping)
        supported = supports(shape.q_heads, shape.kv_heads, shape.head_dim)
        self.writes = alone and supported and 0 < count <= MOST_ROWS

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int,
        kv_scales: torch.Tensor | None = None,
        projected: tuple[torch.Tensor, torch.Tensor] | None = None,
        rotary: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        batch = self.batch
        attended: torch.Tensor
        if self.writes:
            assert rotary is not None
            attended = self._ops.rotary_attention(
                q,
                k_cache=k_cache,
                v_cache=v_cache,
                slots=batch.slots,
                context_lens=batch.context_lens,
                block_tables=batch.block_tables,
                scale=scale,
                max_context_len=batch.max_context_len,
                sliding_window=window,
                kv_scales=kv_scales,
                plan=self._plan,
                **rotary,
            )
            return attended
        attended = self._ops.paged_attention(
            q,
            k_cache,
            v_cache,
            slots=batch.slots,
            query_start=batch.query_start,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
            scale=scale,
            max_query_len=batch.max_query_len,
            num_decodes=batch.num_decodes,
            max_context_len=batch.max_context_len,
            sliding_window=window,
            kv_scales=kv_scales,
            plan=self._plan,
            library=batch.library,
            projected=projected,
            decode_lens=batch.decode_lens,
        )
        return attended


class Attention:
    """Grouped-query self-attention of one layer, with rotary embeddings and perhaps a sliding window.

    ``norms`` are keyword arguments of ``rotary_kv_write`` for families that normalise queries and keys head by head.
    ``kv_scales`` [2, Hkv] float32: by what a float8 cache's keys and values are divided; unused for other formats.
    """

    def __init__(
        self, config: ModelConfig, layer: int, parameters: Parameters, prefix: str, ops: Ops, rotary: torch.Tensor
    ) -> None:
        self._ops = ops
        self._config = config
        self._layer = layer
        self._rotary = rotary
        self._heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self.window = config.layer_windows[layer]
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv = Linear(parameters, prefix, sizes, config.hidden_size, ops, bias=config.attention_bias)
        out, out_bias = {"o_proj": config.hidden_size}, config.attention_out_bias
        self.out = ResidualLinear(parameters, prefix, out, query, ops, bias=out_bias)
        self.norms: dict[str, Any] = {}
        self.kv_scales = torch.ones(2, config.num_kv_heads, device=parameters.device)

    def write(
        self,
        x: torch.Tensor | HalfNorm,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor | None,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """x [T, H], positions and slot_mapping [T] -> queries, keys and values [T, Hq + 2 Hkv, D]; the latter go into
        ``kv_cache`` too. Without a slot_mapping attention will do that: they are as projected."""
        qkv = self.qkv(x).view(len(positions), sum(self._heads), self._head_dim)
        if slot_mapping is None:
            return qkv
        k_cache, v_cache, scales = self._pages(kv_cache)
        self._ops.rotary_kv_write(
            qkv, positions, self._rotary, k_cache, v_cache, slot_mapping, kv_scales=scales, **self.norms
        )
        return qkv

    def add(
        self,
        qkv: torch.Tensor,
        residual: torch.Tensor,
        kv_cache: torch.Tensor,
        attention: AttentionPass,
        norm: RMSNorm | None,
    ) -> Added:
        """What was written -> its output for ``residual`` [T, H]: see :meth:`ResidualLinear.add`."""
        k_cache, v_cache, scales = self._pages(kv_cache)
        if attention.writes:
            rotary = {"cos_sin": self._rotary, **self.norms}
            attended = attention.attend(qkv, k_cache, v_cache, self._scale, self.window, scales, rotary=rotary)
        else:
            q, k, v = qkv.split_with_sizes(self._heads, dim=1)
            attended = attention.attend(q, k_cache, v_cache, self._scale, self.window, scales, (k, v))
        return self.out.add(attended.flatten(1), residual, norm)

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """This layer's keys and values [num_blocks, block_size, Hkv, D], and their scales if they have any."""
        k_cache, v_cache, scales = layer_pages(kv_cache, self._layer, self._config)
        return k_cache, v_cache, self.kv_scales if is_float8(kv_cache.dtype) else scales
