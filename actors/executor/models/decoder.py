"""The one network: a decoder whose layers are what the model's :class:`~pagebus.actors.model.spec.ModelSpec` says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.adapted.products import AdapterPass
from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.layers.attention_pass import AttentionPass
from pagebus.actors.executor.layers.decoder_layer import DecoderLayer
from pagebus.actors.executor.layers.embedding import Embedding, Head
from pagebus.actors.executor.layers.norm import Norm
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.passes import AttentionPasses
from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.executor.layers.rotary import rotary_table
from pagebus.actors.executor.layers.sharded.vocabulary import embedding_of, head_of
from pagebus.actors.executor.models.network import Network
from pagebus.actors.executor.models.passage import Passage
from pagebus.actors.executor.pooling.head import NoHead, PooledHead
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.shards.stage import first_layer
from pagebus.actors.model.spec import Moe


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The tokens of a pass and how they attend: all of them, and in the last layer perhaps those alone whose places are
    in ``last`` [N]; ``last_padding``: as :attr:`Tokens.padding`, of those that the last layer goes on with."""

    tokens: Tokens
    attention: AttentionPass
    ending: AttentionPass
    last: torch.Tensor | None
    last_padding: torch.Tensor | None


class Decoder(Network):
    """Embedding, layers, norm, head; of a stage of a pipeline those that it has. Its tensors are uninitialised until
    weights are loaded.

    ``passes`` begins the attention of each pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        ops: Ops,
        passes: AttentionPasses,
        num_positions: int,
    ) -> None:
        super().__init__(config, passes.chooser, parameters, num_positions)
        self._begin, self.ops = passes.begin, ops
        self.adapters = AdapterPass()
        """Which tokens of the next pass have adapters."""
        spec, device = config.spec, parameters.device
        width = spec.layers[0].mixer.rotary_dim
        tables = {
            place: rotary_table(None if place is None else spec.rope[place], width, num_positions, device)
            for place in {layer.mixer.rope: None for layer in spec.layers}
        }
        self.passage = None if config.stage is None else Passage(config.stage)
        self.embedding = embedding_of(config, parameters, ops)
        first = first_layer(config.stage)
        self.layers = [
            DecoderLayer(config, index, parameters, f"model.layers.{first + index}", ops, tables[layer.mixer.rope])
            for index, layer in enumerate(spec.layers)
        ]
        self.kinds = self.layers[len(self.layers) // 2].kinds
        self._ends_with_experts = isinstance(spec.layers[-1].feed, Moe)
        self.norm = None if self.passes_on else Norm(parameters, "model.norm", spec.hidden, spec.norm, ops)
        self.taps: list[torch.Tensor] = []
        """Where the last hidden states of each pass are copied to: [>= T, H] each. If any, those of all tokens are
        wanted (no ``last`` in the batch)."""
        self.head = None if self.passes_on else _head_of(config, parameters, self.embedding, ops)
        if config.pooler is not None and config.pooler.has_head:
            tokens = self.head.weight if isinstance(self.head, Head) else None
            self.pooled_head = PooledHead(config.pooler, spec.hidden, parameters, tokens)

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """In this block a pass goes through one layer of each kind, and the last, only: others launch the same kernels,
        and take no memory of their own. For warming up."""
        layers = self.layers
        few = list({(layer.spec, *layer.kinds.items()): layer for layer in reversed(layers[:-1])}.values())
        self.layers = [*few, layers[-1]]
        try:
            yield
        finally:
            self.layers = layers

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        pause: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        """input_ids [T] and positions [T] -> hidden states [T, H] after the last norm, or [N, H] of the batch's last
        tokens: of the others the last layer computes keys and values only. ``pause`` is called before each layer."""
        step = self.begin(input_ids, positions, kv_cache, batch)
        stream = self._before_last(step, pause)
        return self.finish(stream, self.layers[-1].project(stream, step.tokens), step)

    @torch.inference_mode()
    def cache(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch,
        pause: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Store keys and values of a pass's tokens, and compute no more than these take; see :meth:`forward`."""
        step = self.begin(input_ids, positions, kv_cache, replace(batch, last=None))
        stored = replace(step.tokens, slot_mapping=batch.slot_mapping)  # no attention follows that could store them
        self.layers[-1].project(self._before_last(step, pause), stored)

    def _before_last(self, step: ForwardPass, pause: Callable[[], object]) -> ResidualStream:
        """All layers but the last."""
        stream = ResidualStream(self.entering(step.tokens.ids), self.ops)
        for layer, following in itertools.pairwise(self.layers):
            pause()
            qkv = layer.project(stream, step.tokens)
            layer.attend(stream, qkv, step.tokens.kv_cache, step.attention)
            del qkv  # the MLP may have its memory
            layer.feed_forward(stream, following.attention_norm, step.tokens.padding)
        pause()
        return stream

    def entering(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream [T, H] before the first of the layers."""
        if self.passage is None or self.passage.stage.first:
            return self.embedding(input_ids)
        spec, parameters = self.config.spec, self.parameters
        return self.passage.enter(len(input_ids), spec.hidden, parameters.dtype, parameters.device)

    def begin(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch
    ) -> ForwardPass:
        """How the tokens of a pass attend; to be asked for before all else that the pass launches."""
        attention, last = self._begin(batch), batch.last
        ending = attention if last is None else self._begin(batch.of_last_tokens(last))
        slots = batch.slot_mapping
        tokens = Tokens(
            input_ids, positions, None if attention.stores else slots, kv_cache, padding=slots,
            windowed_mappings=batch.windowed_mappings,
        )  # fmt: skip
        if last is None:
            return ForwardPass(tokens, attention, ending, None, slots)
        padding = last.context_lens.long() - 1 if self._ends_with_experts else None
        return ForwardPass(tokens, attention, ending, last.index, padding)

    def finish(self, stream: ResidualStream, qkv: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """From the attention of the last layer to the last norm: hidden states as of :meth:`forward`."""
        layer = self.layers[-1]
        if step.last is not None:
            stream.keep(step.last)
            self.adapters.keep_last()
            qkv = qkv.index_select(0, step.last)
        layer.attend(stream, qkv, step.tokens.kv_cache, step.ending)
        del qkv  # the MLP may have its memory
        layer.feed_forward(stream, None, step.last_padding)
        hidden = stream.normed(self.norm)
        assert isinstance(hidden, torch.Tensor)
        for tap in self.taps:
            tap[: len(hidden)].copy_(hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> float32 logits [R, V]; few zeros, if it generates nothing."""
        return NoHead()(hidden) if self.head is None or self.config.pooler is not None else self.head(hidden)


def as_decoder(model: Network) -> Decoder:
    """``model``, which is one: what only decoders do is asked of no other."""
    assert isinstance(model, Decoder)
    return model


def gives_all(model: Network) -> bool:
    """Whether the hidden states of all tokens of a pass are wanted of it, not only those of the last ones."""
    return model.passes_on or (isinstance(model, Decoder) and len(model.taps) > 0)


def _head_of(config: ModelConfig, parameters: Parameters, embedding: Embedding, ops: Ops) -> Head | None:
    """None of a model that neither generates nor tells tokens."""
    if config.pooler is not None and config.pooler.between is None:
        return None
    return head_of(config, parameters, embedding, ops)
