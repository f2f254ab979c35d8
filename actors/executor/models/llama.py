"""Llama 2, 3 and 3.1; the other families differ from it in a few places each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention import Attention
from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.layers.attention_pass import AttentionPass
from pagebus.actors.executor.layers.embedding import Embedding, Head
from pagebus.actors.executor.layers.mlp import GatedMLP
from pagebus.actors.executor.layers.norm import RMSNorm
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.passes import AttentionPasses
from pagebus.actors.executor.layers.residual import ResidualStream
from pagebus.actors.executor.layers.rotary import rotary_table
from pagebus.actors.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The tokens of a pass and how they attend: all of them, and in the last layer perhaps those alone whose places are
    in ``last`` [N]."""

    tokens: Tokens
    attention: AttentionPass
    ending: AttentionPass
    last: torch.Tensor | None


class LlamaLayer:
    """Attention and feed-forward of one layer, each with the norm before it."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, prefix: str, ops: Ops, attention: Attention
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(parameters, f"{prefix}.input_layernorm", size, eps, ops)
        self.attention = attention
        self.mlp_norm = RMSNorm(parameters, f"{prefix}.post_attention_layernorm", size, eps, ops)
        self.mlp = GatedMLP(config, parameters, f"{prefix}.mlp", ops)

    def forward(self, stream: ResidualStream, step: ForwardPass, following: RMSNorm) -> None:
        """x += attention(norm(x)), then x += mlp(norm(x)); the ``following`` norm reads x next."""
        self.attend(stream, self.project(stream, step.tokens), step.tokens.kv_cache, step.attention)
        self.feed_forward(stream, following)

    def project(self, stream: ResidualStream, tokens: Tokens) -> torch.Tensor:
        """The normed stream -> queries, keys and values [T, Hq + 2 Hkv, D]; see :meth:`Attention.project`."""
        return self.attention.project(stream.normed(self.attention_norm), tokens)

    def attend(
        self, stream: ResidualStream, qkv: torch.Tensor, kv_cache: torch.Tensor, attention: AttentionPass
    ) -> None:
        """Add what the tokens find in the cache to the stream."""
        stream.add(self.attention.attend(qkv, kv_cache, attention), self.attention.out, self.mlp_norm)

    def feed_forward(self, stream: ResidualStream, following: RMSNorm | None) -> None:
        """Add the MLP of the normed stream to it; None is no norm that may be half done by then."""
        stream.add(self.mlp.gate_up(stream.normed(self.mlp_norm)), self.mlp.down, following)


class LlamaModel:
    """A decoder: embedding, layers, norm, head. Its tensors are uninitialised until weights are loaded.

    ``passes`` begins the attention of each pass.
    """

    attention_class: ClassVar[type[Attention]] = Attention

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        ops: Ops,
        passes: AttentionPasses,
        num_positions: int,
    ) -> None:
        self.config = config
        self.chooser = passes.chooser
        self._begin = passes.begin
        self.parameters = parameters
        self.num_positions = num_positions
        rotary = rotary_table(config, num_positions, parameters.device)
        self.embedding = Embedding(parameters, "model.embed_tokens", config.vocab_size, config.hidden_size, ops)
        self.layers: list[LlamaLayer] = []
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}"
            attention = self.attention_class(config, index, parameters, f"{prefix}.self_attn", ops, rotary)
            self.layers.append(LlamaLayer(config, parameters, prefix, ops, attention))
        self.norm = RMSNorm(parameters, "model.norm", config.hidden_size, config.rms_norm_eps, ops)
        self.head = Head(parameters, "lm_head", self.embedding, ops, tied=config.tie_word_embeddings)

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """In this block a pass goes through one layer of each kind, and the last, only: others launch the same kernels,
        and take no memory of their own. For warming up."""
        layers = self.layers
        few = list({layer.attention.heads.window: layer for layer in reversed(layers[:-1])}.values())
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
        stream = ResidualStream(self.embedding(input_ids))
        for layer, following in itertools.pairwise(self.layers):
            pause()
            layer.forward(stream, step, following.attention_norm)
        pause()
        return self.finish(stream, self.layers[-1].project(stream, step.tokens), step)

    def begin(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch
    ) -> ForwardPass:
        """How the tokens of a pass attend; to be asked for before all else that the pass launches."""
        attention, last = self._begin(batch), batch.last
        ending = attention if last is None else self._begin(batch.of_last_tokens(last))
        tokens = Tokens(input_ids, positions, None if attention.stores else batch.slot_mapping, kv_cache)
        return ForwardPass(tokens, attention, ending, None if last is None else last.index)

    def finish(self, stream: ResidualStream, qkv: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """From the attention of the last layer to the last norm: hidden states as of :meth:`forward`."""
        layer = self.layers[-1]
        if step.last is not None:
            stream.keep(step.last)
            qkv = qkv.index_select(0, step.last)
        layer.attend(stream, qkv, step.tokens.kv_cache, step.ending)
        del qkv  # the MLP may have its memory
        layer.feed_forward(stream, None)
        hidden = stream.normed(self.norm)
        assert isinstance(hidden, torch.Tensor)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> float32 logits [R, V]."""
        return self.head(hidden)
