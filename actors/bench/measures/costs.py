"""Costs of a step from the model's shape: bytes moved and operations computed, to compare with the device's
roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagebus.actors.bench.measures.watch import Step
from pagebus.actors.model.config import ModelConfig, num_layer_weights
from pagebus.actors.model.quantization.sizes import bits_per_weight

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes and operations of one model's steps. Windows are not regarded: every token attends to all before it."""

    layer_weights: int
    head_weights: int
    weight_bytes: int
    """Of one weight."""
    kv_bytes_per_token: float
    flops_per_pair: int
    """Of attention: one query token with one key token, all heads and layers."""
    tied: bool
    """The head's weights are the embeddings."""
    layer_weight_bytes: float = 0.0
    """Of one weight of the layers, with its part of the scales, if these are quantized; else 0."""

    @classmethod
    def of(cls, config: ModelConfig, info: Mapping[str, Any]) -> Costs:
        """``info`` is the executor's: its number format, and what a block of its cache takes."""
        block_bytes = float(info["block_bytes"]) * (1 + info.get("windowed_pages", 0))
        return cls(
            layer_weights=num_layer_weights(config),
            head_weights=config.hidden_size * config.vocab_size,
            weight_bytes=DTYPE_BYTES[str(info["dtype"])],
            kv_bytes_per_token=block_bytes / float(info["block_size"]),
            flops_per_pair=sum(layer.mixer.flops_per_pair() for layer in config.spec.layers),
            tied=config.tie_word_embeddings,
            layer_weight_bytes=bits_per_weight(config.quantization) / 8,
        )

    @property
    def all_bytes(self) -> int:
        """Of all weights, without norms and biases; the embeddings are the head's or as large."""
        embeddings = 0 if self.tied else self.head_weights
        return round(self._layer_bytes() + (self.head_weights + embeddings) * self.weight_bytes)

    def bytes_of(self, step: Step) -> float:
        """What cannot be avoided: all weights once, the keys and values of the decodes read, new ones written.

        Prompts read theirs at least once too, if they are computed in pieces; that is left out.
        """
        head = self.head_weights if step.num_sampled else 0
        weights = self._layer_bytes() + head * self.weight_bytes
        return weights + self.kv_bytes_per_token * (step.decode_context + step.num_tokens)

    def _layer_bytes(self) -> float:
        return self.layer_weights * (self.layer_weight_bytes or self.weight_bytes)

    def flops_of(self, step: Step) -> float:
        """Two per weight and token, and attention; logits only of tokens that are sampled. What the last layer leaves
        out counts, as it does elsewhere."""
        weights = 2 * (self.layer_weights * step.num_tokens + self.head_weights * step.num_sampled)
        return weights + self.flops_per_pair * (step.decode_context + step.prefill_pairs)
