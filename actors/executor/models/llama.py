"""Llama 2, 3 and 3.1; the other families differ from it in a few places each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from actors.executor.layers.attention import Attention, AttentionBatch, AttentionPass
from actors.executor.layers.embedding import Embedding, Head
from actors.executor.layers.linear import Added
from actors.executor.layers.mlp import GatedMLP
from actors.executor.layers.norm import RMSNorm
from actors.executor.layers.parameters import Parameters
from actors.executor.layers.rotary import rotary_table
from actors.executor.ops import Ops
from actors.model_config import ModelConfig
from kernels.norm import HalfNorm


@dataclass(frozen=True, slots=True)
class Tokens:
    """What T tokens of a pass are, and where their keys and values go: ``ids``, ``positions`` and ``slot_mapping`` [T]
    (negative: nowhere; None: attention itself will store them)."""

    ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor | None
    kv_cache: torch.Tensor


Piece = Callable[[int, torch.Tensor | None, Added, Tokens], tuple[torch.Tensor, torch.Tensor]]
"""What lies between the attentions of two layers: :meth:`LlamaModel.piece`, or what computes the same."""


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


class LlamaModel:
    """A decoder: embedding, layers, norm, head. Its tensors are uninitialised until weights are loaded.

    ``begin`` makes the :class:`AttentionPass` of a batch.
    """

    attention_class: ClassVar[type[Attention]] = Attention

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        ops: Ops,
        begin: Callable[[AttentionBatch], AttentionPass],
        num_positions: int,
    ) -> None:
        self.config = config
        self._begin = begin
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
        few = list({layer.attention.window: layer for layer in reversed(layers[:-1])}.values())
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
        piece: Piece | None = None,
    ) -> torch.Tensor:
        """input_ids [T] and positions [T] -> hidden states [T, H] after the last norm, or [N, H] of the batch's last
        tokens: of the others the last layer computes keys and values only. ``pause`` is called before each layer.
        ``piece`` may stand for :meth:`piece`.

        ``residual`` is the sum of all outputs so far; each norm adds the newest output to it on the way.
        """
        attention, piece = self._begin(batch), piece or self.piece
        ending = attention if batch.last is None else self._begin(batch.of_last_tokens(batch.last))
        tokens = Tokens(input_ids, positions, None if attention.writes else batch.slot_mapping, kv_cache)
        residual: torch.Tensor | None = None
        added: Added = None
        for index, layer in enumerate(self.layers):
            pause()
            residual, qkv = piece(index, residual, added, tokens)
            if layer is self.layers[-1] and batch.last is not None:
                attention, last = ending, batch.last.index
                residual, qkv = residual.index_select(0, last), qkv.index_select(0, last)
            added = layer.attention.add(qkv, residual, kv_cache, attention, layer.mlp_norm)
            del qkv  # the next piece may have its memory
        assert residual is not None
        hidden = self.norm.add(self._feed_forward(self.layers[-1], residual, added, None), residual)
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def piece(
        self, index: int, residual: torch.Tensor | None, added: Added, tokens: Tokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From where the attention of the layer before ends to where that of layer ``index`` begins: ``residual``
        [T, H], None before the first layer, and what is still to be added to it -> itself, and queries, keys and values
        [T, Hq + 2 Hkv, D] as :meth:`Attention.write` leaves them."""
        layer = self.layers[index]
        norm = layer.attention_norm
        hidden: torch.Tensor | HalfNorm
        if residual is None:
            residual = self.embedding(tokens.ids)
            hidden = norm(residual)
        else:
            hidden = norm.add(self._feed_forward(self.layers[index - 1], residual, added, norm), residual)
        return residual, layer.attention.write(hidden, tokens.positions, tokens.slot_mapping, tokens.kv_cache)

    def _feed_forward(self, layer: LlamaLayer, residual: torch.Tensor, added: Added, norm: RMSNorm | None) -> Added:
        """The output of the layer's MLP for ``residual``, to which its attention was ``added``; ``norm`` comes next."""
        return layer.mlp.add(layer.mlp_norm.add(added, residual), residual, norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> float32 logits [R, V]."""
        return self.head(hidden)
