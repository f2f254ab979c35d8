"""Attention over the paged cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import Tokens
from pagebus.actors.executor.layers.attention_pass import AttentionPass, Heads, Pages
from pagebus.actors.executor.layers.linear import Linear, ResidualLinear
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.rotary import head_order, query_factors
from pagebus.actors.executor.layers.sharded.norms import norm_widths, widths_of
from pagebus.actors.executor.memory.kv_cache import is_float8, layer_pages
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.attention.paged_attention import AttentionShape, capability_of
from pagebus.kernels.latent.shape import LatentShape
from pagebus.kernels.quantized.products import Inputs


def attention_shape(
    config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device | None = None
) -> AttentionShape:
    """Of a model that computes in ``dtype`` on ``device``."""
    if config.latent is not None:
        mixer = config.latent
        return LatentShape(mixer.heads, 1, mixer.kv_rank, dtype.itemsize, rope_dim=mixer.rope_dim)
    return AttentionShape(
        config.num_heads, config.num_kv_heads, config.head_dim, dtype.itemsize, frozenset(config.layer_windows),
        float8=cache_dtype.itemsize == 1,
        capability=capability_of(device or torch.device("cpu")),
    )  # fmt: skip


class Attention:
    """Grouped-query self-attention of one layer; ``out`` is the product that goes into the residual stream.

    ``rotary`` is the layer's table of angles, which says how many positions there are. It reads ``num_inputs`` numbers
    of each token, by default as many as a hidden state has.
    ``kv_scales`` [2, Hkv] float32: by what a float8 cache's keys and values are divided; unused for other formats.
    """

    def __init__(
        self, config: ModelConfig, layer: int, parameters: Parameters, prefix: str, ops: Ops, rotary: torch.Tensor,
        num_inputs: int | None = None,
    ) -> None:  # fmt: skip
        self._ops, self._config, self._layer = ops, config, layer
        page, self._place = config.cache_groups.layers[layer]
        spec, hidden, fused = config.spec.layers[layer].mixer, config.hidden_size, config.names.qkv
        self.sizes = spec.heads, spec.kv_heads, spec.kv_heads
        query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        sizes = {"q_proj": query, "k_proj": key, "v_proj": key} if fused is None else {fused: query + 2 * key}
        order = None if spec.rope is None else head_order(config.spec.rope[spec.rope], spec.head_dim)
        by_rows = order is not None or config.names.qkv_by_head
        self.qkv = Linear(parameters, prefix, sizes, num_inputs or hidden, ops, bias=spec.bias, by_rows=by_rows)
        self.out = ResidualLinear(parameters, prefix, {"o_proj": hidden}, query, ops, bias=spec.out_bias)
        if config.names.qkv_by_head:
            parameters.after_load(self._sort_by_part)
        self._order = None if order is None else torch.tensor(order, device=parameters.device)
        if self._order is not None:
            parameters.after_load(self._reorder)
        sinks = parameters.bias({f"{prefix}.sinks": spec.heads}, torch.float32) if spec.sinks else None
        self.heads = Heads(
            self.sizes, spec.head_dim, spec.scale, spec.reach, rotary, softcap=spec.softcap, sinks=sinks,
            page=page,
        )  # fmt: skip
        self._q_width_norm: torch.Tensor | None = None
        self._k_width_norm: torch.Tensor | None = None
        if spec.qk_norm != "none":
            self._norm_heads(parameters, prefix)
        factors = query_factors(spec.position_scale, len(rotary), parameters.device)
        self._query_factors = None if factors is None else factors.to(parameters.dtype)
        self.kv_scales = torch.ones(2, spec.kv_heads, device=parameters.device)

    @property
    def products(self) -> list[Linear]:
        """Those that adapters may change."""
        return [self.qkv, self.out]

    def project(self, x: Inputs, tokens: Tokens) -> torch.Tensor:
        """x [T, H] -> queries, keys and values [T, Hq + 2 Hkv, D], rotated and, the latter, in the cache too. Without a
        slot mapping attention will do that: they are as projected."""
        heads = self.heads
        qkv = self.qkv(x).view(len(tokens.positions), sum(heads.sizes), heads.head_dim)
        if self._q_width_norm is not None:
            self._norm_widths(qkv)
        if self._query_factors is not None:
            qkv[:, : self.sizes[0]].mul_(self._query_factors.index_select(0, tokens.positions))
        mapping = tokens.mapping_of(heads.page)
        if mapping is not None:
            k_cache, v_cache, scales = self._pages(tokens.kv_cache)
            self._ops.rotary_kv_write(
                qkv, tokens.positions, heads.cos_sin, k_cache, v_cache, mapping,
                q_norm=heads.q_norm, k_norm=heads.k_norm, eps=heads.eps, kv_scales=scales,
            )  # fmt: skip
        return qkv

    def store(self, x: torch.Tensor, tokens: Tokens) -> None:
        """Keys and values of x [T, H] alone, into the cache: what :meth:`project` does where nobody attends. Weights
        are not quantized, norms are not of all heads at once, and ``tokens`` have a slot mapping."""
        heads, weight, bias = self.heads, self.qkv.weight, self.qkv.bias
        assert isinstance(weight, torch.Tensor)
        assert tokens.slot_mapping is not None
        first = heads.sizes[0] * heads.head_dim
        product = self._ops.linear(x, weight[first:], None if bias is None else bias[first:])
        k_cache, v_cache, scales = self._pages(tokens.kv_cache)
        self._ops.rotary_kv_write(
            product.view(len(x), 2 * heads.sizes[1], heads.head_dim), tokens.positions, heads.cos_sin, k_cache, v_cache,
            tokens.slot_mapping, q_norm=heads.q_norm, k_norm=heads.k_norm, eps=heads.eps, kv_scales=scales,
        )  # fmt: skip

    def attend(self, qkv: torch.Tensor, kv_cache: torch.Tensor, attention: AttentionPass) -> torch.Tensor:
        """What :meth:`project` gave -> attended values [T, Hq * D], for ``out``."""
        return attention.attend(qkv, self._pages(kv_cache), self.heads).flatten(1)

    def _norm_heads(self, parameters: Parameters, prefix: str) -> None:
        """Norms of queries and keys: of each head, which the kernels do that rotate them, or of all heads at once."""
        norm, (query, key, _), dim = self._config.spec.norm, self.sizes, self.heads.head_dim
        if self._config.spec.layers[self._layer].mixer.qk_norm == "unit":
            ones = torch.ones(dim, device=parameters.device, dtype=parameters.dtype)
            self.heads = replace(self.heads, q_norm=ones, k_norm=ones, eps=norm.eps)
            return
        per_head = self._config.spec.layers[self._layer].mixer.qk_norm == "head"
        query, key = (1, 1) if per_head else (query, key)
        q_norm = parameters.norm(f"{prefix}.q_norm.weight", query * dim, norm)
        k_norm = parameters.norm(f"{prefix}.k_norm.weight", key * dim, norm)
        if per_head:
            self.heads = replace(self.heads, q_norm=q_norm, k_norm=k_norm, eps=norm.eps)
        else:
            self._q_width_norm, self._k_width_norm = q_norm, k_norm

    def _norm_widths(self, qkv: torch.Tensor) -> None:
        """Norm the queries, and the keys, of qkv [T, Hq + 2 Hkv, D] in place, over all heads at once."""
        assert self._q_width_norm is not None
        assert self._k_width_norm is not None
        eps, query = self._config.spec.norm.eps, len(self._q_width_norm)
        flat = qkv.view(len(qkv), -1)
        q, k = flat[:, :query], flat[:, query : query + len(self._k_width_norm)]
        shard = self._config.shard
        if shard is not None:
            weights = self._q_width_norm, self._k_width_norm
            norm_widths(q, k, weights, eps, widths_of(shard, self._layer), self._ops)
            return
        self._ops.rms_norm(q, self._q_width_norm, eps, q)
        self._ops.rms_norm(k, self._k_width_norm, eps, k)

    def _sort_by_part(self) -> None:
        """Of files with each key head between its queries and its values: all queries first, then all keys."""
        heads, kv_heads, _ = self.sizes
        rows = (heads + 2 * kv_heads) * self.heads.head_dim
        together = torch.arange(rows, device=self.kv_scales.device).view(kv_heads, heads // kv_heads + 2, -1)
        parts = together[:, :-2], together[:, -2:-1], together[:, -1:]
        self.qkv.reorder(torch.cat([each.flatten() for each in parts]))

    def _reorder(self) -> None:
        """Put the rows of queries and keys, their biases and norms, into the order of our kernels."""
        assert self._order is not None
        rows, dim = (self.sizes[0] + self.sizes[1]) * self.heads.head_dim, self.heads.head_dim
        places = torch.arange(rows, device=self._order.device).view(-1, dim)
        self.qkv.reorder(places[:, self._order].flatten())
        norms = (self.heads.q_norm, self.heads.k_norm, self._q_width_norm, self._k_width_norm)
        for part in (norm for norm in norms if norm is not None):
            by_head = part.view(-1, dim, *part.shape[1:])
            by_head.copy_(by_head[:, self._order])

    def _pages(self, kv_cache: torch.Tensor) -> Pages:
        """This layer's part of the cache."""
        k_cache, v_cache, scales = layer_pages(kv_cache, self._place, self._config)
        return k_cache, v_cache, self.kv_scales if is_float8(kv_cache.dtype) else scales
