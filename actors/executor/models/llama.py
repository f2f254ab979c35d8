"""Llama 2, 3 and 3.1; the other families differ from it in a few places each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from actors.executor.layers.attention import Attention, AttentionBatch, AttentionPass
from actors.executor.layers.embedding import Embedding, Head
from actors.executor.layers.mlp import GatedMLP
from actors.executor.layers.norm import RMSNorm
from actors.executor.layers.parameters import Parameters
from actors.executor.layers.rotary import rotary_table
from actors.executor.ops import Ops
from actors.model_config import ModelConfig


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
    ) -> torch.Tensor:
        """input_ids [T] and positions [T] -> hidden states [T, H] after the last norm, or [N, H] of the batch's last
        tokens: of the others the last layer computes keys and values only. ``pause`` is called before each layer.

        ``residual`` is the sum of all outputs so far; each norm adds the newest output to it on the way.
        """
        attention, last = self._begin(batch), None
        ending = attention if batch.last is None else self._begin(batch.of_last_tokens(batch.last))
        residual = self.embedding(input_ids)
        hidden = self.layers[0].attention_norm(residual)
        next_norms = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            pause()
            if layer is self.layers[-1] and batch.last is not None:
                attention, last = ending, batch.last.index
            residual = residual if last is None else residual.index_select(0, last)
            added = layer.attention.add(hidden, residual, positions, kv_cache, attention, last)
            added = layer.mlp.add(layer.mlp_norm.add(added, residual), residual)
            hidden = next_norm.add(added, residual)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> float32 logits [R, V]."""
        return self.head(hidden)
