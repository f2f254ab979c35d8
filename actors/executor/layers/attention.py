"""Attention over the paged cache."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import Tokens
from pagebus.actors.executor.layers.attention_pass import AttentionPass, Heads, Pages
from pagebus.actors.executor.layers.linear import Linear, ResidualLinear
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.memory.kv_cache import is_float8, layer_pages
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.attention.paged_attention import AttentionShape
from pagebus.kernels.layers.norm import HalfNorm


def attention_shape(config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype) -> AttentionShape:
    """Of a model that computes in ``dtype``."""
    return AttentionShape(
        config.num_heads, config.num_kv_heads, config.head_dim, dtype.itemsize, frozenset(config.layer_windows),
        float8=cache_dtype.itemsize == 1,
    )  # fmt: skip


class Attention:
    """Grouped-query self-attention of one layer, with rotary embeddings and perhaps a sliding window; ``out`` is the
    product that goes into the residual stream.

    ``kv_scales`` [2, Hkv] float32: by what a float8 cache's keys and values are divided; unused for other formats.
    """

    def __init__(
        self, config: ModelConfig, layer: int, parameters: Parameters, prefix: str, ops: Ops, rotary: torch.Tensor
    ) -> None:
        self._ops = ops
        self._config = config
        self._layer = layer
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv = Linear(parameters, prefix, sizes, config.hidden_size, ops, bias=config.attention_bias)
        out, out_bias = {"o_proj": config.hidden_size}, config.attention_out_bias
        self.out = ResidualLinear(parameters, prefix, out, query, ops, bias=out_bias)
        self.heads = self._make_heads(config, parameters, prefix, rotary)
        self.kv_scales = torch.ones(2, config.num_kv_heads, device=parameters.device)

    def project(self, x: torch.Tensor | HalfNorm, tokens: Tokens) -> torch.Tensor:
        """x [T, H] -> queries, keys and values [T, Hq + 2 Hkv, D], rotated and, the latter, in the cache too. Without a
        slot mapping attention will do that: they are as projected."""
        heads = self.heads
        qkv = self.qkv(x).view(len(tokens.positions), sum(heads.sizes), heads.head_dim)
        if tokens.slot_mapping is not None:
            k_cache, v_cache, scales = self._pages(tokens.kv_cache)
            self._ops.rotary_kv_write(
                qkv, tokens.positions, heads.cos_sin, k_cache, v_cache, tokens.slot_mapping,
                q_norm=heads.q_norm, k_norm=heads.k_norm, eps=heads.eps, kv_scales=scales,
            )  # fmt: skip
        return qkv

    def attend(self, qkv: torch.Tensor, kv_cache: torch.Tensor, attention: AttentionPass) -> torch.Tensor:
        """What :meth:`project` gave -> attended values [T, Hq * D], for ``out``."""
        return attention.attend(qkv, self._pages(kv_cache), self.heads).flatten(1)

    def _make_heads(self, config: ModelConfig, parameters: Parameters, prefix: str, rotary: torch.Tensor) -> Heads:
        """For families whose heads have weights of their own."""
        sizes, head_dim = (config.num_heads, config.num_kv_heads, config.num_kv_heads), config.head_dim
        return Heads(sizes, head_dim, head_dim**-0.5, config.layer_windows[self._layer], rotary)

    def _pages(self, kv_cache: torch.Tensor) -> Pages:
        """This layer's part of the cache."""
        k_cache, v_cache, scales = layer_pages(kv_cache, self._layer, self._config)
        return k_cache, v_cache, self.kv_scales if is_float8(kv_cache.dtype) else scales
