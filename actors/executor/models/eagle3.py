"""An EAGLE-3 head: one layer that guesses the token after the next from hidden states of a model and the next token.

At position p it reads the feature of p, made of three of the model's hidden states there, and the embedding of the
token at p + 1. From both it makes the feature that it expects at p + 1, and the token at p + 2. Further ahead its own
features stand in for the model's. Its keys and values follow from its inputs alone. Ranks divide layer, head and
embedding as they divide those of a model.

The paper: https://arxiv.org/abs/2503.01840. Names of tensors are those of the ``speculators`` library.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention import Attention, attention_shape
from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.layers.embedding import Embedding
from pagebus.actors.executor.layers.mlp import GatedMLP
from pagebus.actors.executor.layers.norm import Norm
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.passes import AttentionPasses
from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.executor.layers.rotary import rotary_table
from pagebus.actors.executor.layers.sharded.vocabulary import embedding_of
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.executor.models.eagle3_config import Eagle3Config
from pagebus.actors.model.spec import Dense
from pagebus.kernels.attention.choice import AttentionChooser, AttentionSetup
from pagebus.kernels.common.target import target_of

LAYER = "layers.0"


class Eagle3:
    """A :class:`~pagebus.actors.executor.models.draft_head.DraftHead`. Its tensors are uninitialised until weights are
    loaded. ``ops`` are those beside the model. ``embedding``: the model's, for a head without one of its own.
    ``token_ids`` [draft_vocab]: which tokens of the vocabulary the head knows; a rank has the logits of some of
    them."""

    def __init__(
        self, config: Eagle3Config, parameters: Parameters, num_positions: int, ops: Ops, embedding: Embedding | None
    ) -> None:
        self.config, self.parameters, self._ops = config, parameters, ops
        layer, device = config.layer, parameters.device
        spec, hidden, read = layer.spec, layer.spec.hidden, len(config.taps) * config.target_hidden
        if embedding is None:
            embedding = embedding_of(layer, parameters, ops, "embed_tokens")
        self._embedding = embedding.unscaled()
        self._fc = parameters.matrix({"fc.weight": hidden}, read)
        before_fc = {"input_norm": read} if config.norm_before_fc else {}
        if config.fc_norm:
            before_fc |= {f"fc_norm.{place}": config.target_hidden for place in range(len(config.taps))}
        self._before_fc = [Norm(parameters, name, size, spec.norm, ops) for name, size in before_fc.items()]
        self._embedding_norm = Norm(parameters, f"{LAYER}.input_layernorm", hidden, spec.norm, ops)
        self._feature_norm = Norm(parameters, f"{LAYER}.hidden_norm", hidden, spec.norm, ops)
        mixer, feed = spec.layers[0].mixer, spec.layers[0].feed
        assert isinstance(feed, Dense)
        rotary = rotary_table(spec.rope[0], mixer.rotary_dim, num_positions, device)
        self._attention = Attention(layer, 0, parameters, f"{LAYER}.self_attn", ops, rotary, num_inputs=2 * hidden)
        self._feed_norm = Norm(parameters, f"{LAYER}.post_attention_layernorm", hidden, spec.norm, ops)
        self._feed = GatedMLP(feed, hidden, parameters, f"{LAYER}.mlp", ops)
        self._norm = Norm(parameters, "norm", hidden, spec.norm, ops)
        self._head = parameters.matrix({"lm_head.weight": len(config.own_tokens)}, hidden)
        self.token_ids = torch.arange(config.draft_vocab, dtype=torch.int32, device=device)
        dtype = parameters.dtype
        setup = AttentionSetup(
            target_of(device), dtype, dtype, mixer.heads, mixer.kv_heads, mixer.head_dim, frozenset(layer.layer_windows)
        )
        self._passes = AttentionPasses(ops, attention_shape(layer, dtype, dtype, device), AttentionChooser(setup))

    @property
    def lag(self) -> int:
        return 1

    @property
    def read_size(self) -> int:
        return len(self.config.taps) * self.config.target_hidden

    @property
    def feature_size(self) -> int:
        return self.config.layer.hidden_size

    def tap(self, model: Decoder, hidden: torch.Tensor) -> None:
        for index, part in zip(self.config.taps, hidden.split(self.config.target_hidden, dim=1), strict=True):
            model.layers[index].taps.append(part)

    def accompany(
        self, tokens: Tokens, kv_cache: torch.Tensor, batch: AttentionBatch, pause: Callable[[], object]
    ) -> None:
        """Its keys follow from features, which are there behind the pass: see :meth:`cache`."""

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.norm_before_fc:
            hidden = self._before_fc[0](hidden)
        if self.config.fc_norm:
            parts = hidden.chunk(len(self.config.taps), dim=1)
            norms = self._before_fc[-len(parts) :]
            hidden = torch.cat([norm(part.contiguous()) for norm, part in zip(norms, parts, strict=True)], dim=1)
        return self._ops.linear(hidden, self._fc, None)

    def cache(self, tokens: Tokens, features: torch.Tensor) -> None:
        self._attention.store(self._inputs(tokens.ids, features)[0], tokens)

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor, kv_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        attention = self._passes.begin(batch)
        tokens = Tokens(ids, positions, None if attention.stores else batch.slot_mapping, kv_cache)
        x, residual = self._inputs(ids, features)
        stream = ResidualStream(residual, self._ops)
        qkv = self._attention.project(x, tokens)
        stream.add(self._attention.attend(qkv, kv_cache, attention), self._attention.out, self._feed_norm)
        self._feed.into(stream, stream.normed(self._feed_norm), None, None, 1.0, None)
        normed = stream.normed(self._norm)
        assert isinstance(normed, torch.Tensor)
        logits = self._ops.linear(normed, self._head, None, torch.float32)
        return logits, normed if self.config.norm_output else stream.values

    def _inputs(self, ids: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What queries, keys and values are made of [T, 2 H], and where the residual stream begins [T, H]."""
        size = self.config.layer.hidden_size
        joined = torch.empty(len(ids), 2 * size, dtype=features.dtype, device=features.device)
        self._embedding_norm.of(self._embedding(ids), joined[:, :size])
        normed = self._feature_norm.of(features, joined[:, size:])
        return joined, normed.contiguous() if self.config.norm_before_residual else features
