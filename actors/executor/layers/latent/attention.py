"""Multi-head latent attention over the paged cache, which holds one short vector per token for all heads."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import Tokens
from pagebus.actors.executor.layers.attention_pass import AttentionPass, Heads, Pages
from pagebus.actors.executor.layers.linear import Linear, ResidualLinear
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.rotary import head_order, query_factors
from pagebus.actors.executor.memory.kv_cache import layer_pages
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.spec import Mla, NormSpec
from pagebus.kernels.quantized.products import Inputs


class LatentAttention:
    """Latent attention of one layer; ``out`` is the product that goes into the residual stream.

    One product gives queries, or their latents, and what goes into the cache. The matrix that expands latents to keys
    and values stays as it is in the files: its two parts are what queries and attended latents are multiplied with.
    """

    def __init__(
        self, config: ModelConfig, layer: int, parameters: Parameters, prefix: str, ops: Ops, rotary: torch.Tensor
    ) -> None:
        spec = config.spec.layers[layer].mixer
        assert isinstance(spec, Mla)
        self._ops, self._config, self._layer, self._spec = ops, config, layer, spec
        queries, hidden = spec.heads * spec.query_dim, config.hidden_size
        first = {"q_a_proj": spec.q_rank} if spec.q_rank else {"q_proj": queries}
        sizes = first | {"kv_a_proj_with_mqa": spec.head_dim}
        biased = spec.bias and spec.q_rank > 0
        self.qkv = Linear(parameters, prefix, sizes, hidden, ops, bias=biased, by_rows=True)
        self._latent_bias = None
        if spec.bias and not spec.q_rank:  # of the part alone that makes latents
            self._latent_bias = parameters.bias({f"{prefix}.kv_a_proj_with_mqa.bias": spec.head_dim})
        norm = NormSpec(eps=spec.latent_eps)
        self._queries: Linear | None = None
        if spec.q_rank:
            self._query_norm = parameters.norm(f"{prefix}.q_a_layernorm.weight", spec.q_rank, norm)
            self._queries = Linear(
                parameters, prefix, {"q_b_proj": queries}, spec.q_rank, ops, bias=False, by_rows=True
            )
        self._norm = parameters.norm(f"{prefix}.kv_a_layernorm.weight", spec.kv_rank, norm)
        rows = {f"{prefix}.kv_b_proj.weight": spec.heads * spec.expanded_dim}
        expansion = parameters.matrix(rows, spec.kv_rank).view(spec.heads, spec.expanded_dim, spec.kv_rank)
        self.out = ResidualLinear(parameters, prefix, {"o_proj": hidden}, spec.attended, ops, bias=spec.out_bias)
        self.heads = Heads((spec.heads, 1, 0), spec.query_dim, spec.scale, 0, rotary, expansion=expansion)
        self._reorder_at_load(parameters)
        factors = query_factors(spec.position_scale, len(rotary), parameters.device)
        self._query_factors = None if factors is None else factors.to(parameters.dtype)
        self.kv_scales = torch.ones(2, 1, device=parameters.device)

    @property
    def products(self) -> list[Linear]:
        """Those that adapters may change."""
        return [self.qkv, *([] if self._queries is None else [self._queries]), self.out]

    def project(self, x: Inputs, tokens: Tokens) -> torch.Tensor:
        """x [T, H] -> queries [T, heads, N + R], rotated; latents are in the cache then."""
        spec, count = self._spec, len(tokens.positions)
        product = self.qkv(x)
        first, latents = product.split_with_sizes((product.shape[1] - spec.head_dim, spec.head_dim), 1)
        if self._latent_bias is not None:
            latents += self._latent_bias
        if self._queries is not None:
            first = self._queries(self._ops.rms_norm(first, self._query_norm, spec.latent_eps))
        q: torch.Tensor = first.unflatten(1, (spec.heads, spec.query_dim))
        assert tokens.slot_mapping is not None
        assert len(q) == count
        self._ops.latent_write(
            q, latents, tokens.positions, self.heads.cos_sin, self._pages(tokens.kv_cache)[0].squeeze(2),
            tokens.slot_mapping, norm=self._norm, eps=spec.latent_eps,
        )  # fmt: skip
        if self._query_factors is not None:
            q.mul_(self._query_factors.index_select(0, tokens.positions))
        return q

    def attend(self, q: torch.Tensor, kv_cache: torch.Tensor, attention: AttentionPass) -> torch.Tensor:
        """What :meth:`project` gave -> attended values [T, heads * V], for ``out``."""
        return attention.attend(q, self._pages(kv_cache), self.heads).flatten(1)

    def _reorder_at_load(self, parameters: Parameters) -> None:
        """Have the rows of what turns put into the order of our kernels, if the files have them in another."""
        spec = self._spec
        order = None if spec.rope is None else head_order(self._config.spec.rope[spec.rope], spec.rope_dim)
        if order is None:
            return
        places = torch.tensor(order, device=parameters.device)

        def reorder() -> None:
            rows = torch.arange(self.qkv.weight.shape[0], device=places.device)
            rows[-spec.rope_dim :] = rows[-spec.rope_dim :][places]
            queries = torch.arange(spec.heads * spec.query_dim, device=places.device).view(spec.heads, -1)
            queries[:, spec.nope_dim :] = queries[:, spec.nope_dim :][:, places]
            if self._queries is not None:
                self._queries.reorder(queries.flatten())
            else:
                rows[: -spec.head_dim] = queries.flatten()
            self.qkv.reorder(rows)
            if self._latent_bias is not None:
                self._latent_bias[-spec.rope_dim :] = self._latent_bias[-spec.rope_dim :][places]

        parameters.after_load(reorder)

    def _pages(self, kv_cache: torch.Tensor) -> Pages:
        """This layer's part of the cache: the values are in the keys."""
        return layer_pages(kv_cache, self._layer, self._config)
