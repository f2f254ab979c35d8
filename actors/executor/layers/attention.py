"""Attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from actors.executor.layers.linear import Linear
from actors.executor.layers.parameters import Parameters
from actors.executor.ops import Ops
from actors.model_config import ModelConfig


@dataclass(slots=True)
class AttentionBatch:
    """Which tokens of a pass belong to which sequences. R rows, T tokens, S slots.

    ``slots`` [R], ``query_start`` [R + 1], ``context_lens`` [R] (with this pass's tokens) and ``block_tables`` [S, MB]
    are int32, ``slot_mapping`` [T] int64 (block * block_size + offset, -1: not stored). The first ``num_decodes`` rows
    have one token each. ``max_context_len`` is an upper bound.
    """

    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int


class AttentionPass(Protocol):
    """One pass's way to the cache, made once per pass and used by all layers."""

    def store(self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Write k, v [T, Hkv, D] into a layer's views [num_blocks, block_size, Hkv, D] of the cache."""

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        """Attention of q [T, Hq, D] over what is stored -> [T, Hq, D]; ``window`` 0 is all."""
        ...


class KernelPass:
    """An :class:`AttentionPass` that calls the device's operations."""

    def __init__(self, ops: Ops, batch: AttentionBatch) -> None:
        self._ops = ops
        self._batch = batch

    def store(self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        self._ops.kv_write(k, v, k_cache, v_cache, self._batch.slot_mapping)

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, window: int
    ) -> torch.Tensor:
        batch = self._batch
        attended: torch.Tensor = self._ops.paged_attention(
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
        )
        return attended


class Attention:
    """Grouped-query self-attention of one layer, with rotary embeddings and perhaps a sliding window."""

    def __init__(
        self, config: ModelConfig, layer: int, parameters: Parameters, prefix: str, ops: Ops, rotary: torch.Tensor
    ) -> None:
        self._ops = ops
        self._layer = layer
        self._rotary = rotary
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._window = config.layer_windows[layer]
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv = Linear(parameters, prefix, sizes, config.hidden_size, bias=config.attention_bias)
        self.out = Linear(parameters, prefix, {"o_proj": config.hidden_size}, query, bias=config.attention_out_bias)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, attention: AttentionPass
    ) -> torch.Tensor:
        """x [T, H] and positions [T] -> [T, H]; writes the tokens' keys and values into ``kv_cache``."""
        q, k, v = self.qkv(x).view(len(x), sum(self._heads), self._head_dim).split_with_sizes(self._heads, dim=1)
        q, k = self.prepare(q, k)
        self._ops.rotary_embedding_(q, k, positions, self._rotary)
        k_cache, v_cache = kv_cache.select(1, self._layer).unbind(1)
        attention.store(k, v, k_cache, v_cache)
        attended = attention.attend(q, k_cache, v_cache, self._scale, self._window)
        return self.out(attended.flatten(1))

    def prepare(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What happens to q [T, Hq, D] and k [T, Hkv, D] before they are rotated: nothing here."""
        return q, k
