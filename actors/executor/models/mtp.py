"""The layer of a checkpoint that guesses the token after the next: multi-token prediction (MTP) as in DeepSeek-V3
(https://arxiv.org/abs/2412.19437, section 2.2), GLM-4.5 and others that have its names.

At position p it reads the model's last hidden state there, behind the last norm, and the embedding of the token at
p + 1; both are normed, joined, and brought to their size by a product. A layer like the model's own follows, with its
attention and experts, then a norm and a head: it guesses the token at p + 2. Further ahead its own states, before that
norm, stand in for the model's. Checkpoints with several such layers use the first one for all guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from pagebus.actors.executor.layers.attention import attention_shape
from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.layers.decoder_layer import DecoderLayer
from pagebus.actors.executor.layers.norm import Norm
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.passes import AttentionPasses
from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.executor.layers.rotary import rotary_table
from pagebus.actors.executor.layers.sharded.sums import ops_beside
from pagebus.actors.executor.layers.sharded.vocabulary import embedding_of, head_of
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.attention.choice import AttentionChooser, AttentionSetup
from pagebus.kernels.common.target import target_of

EMBEDDING, HEAD = "embed_tokens", "shared_head.head"
"""Which checkpoints may have beside the layer, where they are not those of the model."""


class Mtp:
    """A :class:`~pagebus.actors.executor.models.draft_head.DraftHead`. Its tensors are uninitialised until weights are
    loaded. ``config``: that of `mtp_layer`; ``prefix``: how its names begin; ``own``: which of `EMBEDDING` and `HEAD`
    it has for itself."""

    def __init__(self, config: ModelConfig, prefix: str, model: Decoder, own: Collection[str]) -> None:
        assert model.head is not None
        self.config = config
        device, dtype = model.parameters.device, model.parameters.dtype
        self.parameters = parameters = Parameters(device, dtype, config.quantization, config.names)
        spec, self._ops = config.spec, ops_beside(model.ops, device)
        ops, hidden = self._ops, spec.hidden
        (layer,) = spec.layers
        mixer = layer.mixer
        self._embedding_norm = Norm(parameters, f"{prefix}.enorm", hidden, spec.norm, ops)
        self._hidden_norm = Norm(parameters, f"{prefix}.hnorm", hidden, spec.norm, ops)
        self._joined = parameters.matrix({f"{prefix}.eh_proj.weight": hidden}, 2 * hidden)
        rope = None if mixer.rope is None else spec.rope[mixer.rope]
        rotary = rotary_table(rope, mixer.rotary_dim, model.num_positions, device)
        self._layer = DecoderLayer(config, 0, parameters, prefix, ops, rotary)
        self._norm = Norm(parameters, f"{prefix}.shared_head.norm", hidden, spec.norm, ops)
        self._embedding, self._head = model.embedding, model.head
        if EMBEDDING in own:
            self._embedding = embedding_of(config, parameters, ops, f"{prefix}.{EMBEDDING}")
        if HEAD in own:
            self._head = head_of(config, parameters, self._embedding, ops, f"{prefix}.{HEAD}")
        setup = AttentionSetup(
            target_of(device), dtype, dtype, mixer.heads, mixer.kv_heads, mixer.head_dim, frozenset({mixer.reach}),
            softcap=mixer.softcap > 0, sinks=mixer.sinks, latent=config.latent is not None,
        )  # fmt: skip
        self._passes = AttentionPasses(ops, attention_shape(config, dtype, dtype, device), AttentionChooser(setup))

    @property
    def lag(self) -> int:
        return 1

    @property
    def read_size(self) -> int:
        return self.config.hidden_size

    @property
    def feature_size(self) -> int:
        return self.config.hidden_size

    @property
    def token_ids(self) -> None:
        """Its logits are of all tokens."""

    def tap(self, model: Decoder, hidden: torch.Tensor) -> None:
        model.taps.append(hidden)

    def accompany(
        self, tokens: Tokens, kv_cache: torch.Tensor, batch: AttentionBatch, pause: Callable[[], object]
    ) -> None:
        """Its keys follow from features, which are there behind the pass: see :meth:`cache`."""

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def cache(self, tokens: Tokens, features: torch.Tensor) -> None:
        self._layer.project(self._stream(tokens.ids, features), tokens)

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor, kv_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        attention, layer, slots = self._passes.begin(batch), self._layer, batch.slot_mapping
        tokens = Tokens(ids, positions, None if attention.stores else slots, kv_cache, padding=slots)
        stream = self._stream(ids, features)
        qkv = layer.project(stream, tokens)
        layer.attend(stream, qkv, kv_cache, attention)
        layer.feed_forward(stream, None, slots)
        normed = stream.normed(self._norm)
        assert isinstance(normed, torch.Tensor)
        return self._head(normed), stream.values

    def _stream(self, ids: torch.Tensor, features: torch.Tensor) -> ResidualStream:
        """Where the layer begins."""
        joined = torch.cat((self._embedding_norm(self._embedding(ids)), self._hidden_norm(features)), dim=1)
        return ResidualStream(self._ops.linear(joined, self._joined, None), self._ops)
