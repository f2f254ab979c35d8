"""Qwen3: Llama whose queries and keys are normalised head by head before they are rotated."""

from __future__ import annotations

from dataclasses import replace

import torch

from pagebus.actors.executor.layers.attention import Attention
from pagebus.actors.executor.layers.attention_pass import Heads
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.models.llama import LlamaModel
from pagebus.actors.model.config import ModelConfig


class Qwen3Attention(Attention):
    """Attention with norms over the head dimension."""

    def _make_heads(self, config: ModelConfig, parameters: Parameters, prefix: str, rotary: torch.Tensor) -> Heads:
        return replace(
            super()._make_heads(config, parameters, prefix, rotary),
            q_norm=parameters.norm(f"{prefix}.q_norm.weight", config.head_dim),
            k_norm=parameters.norm(f"{prefix}.k_norm.weight", config.head_dim),
            eps=config.rms_norm_eps,
        )


class Qwen3Model(LlamaModel):
    """Nothing but the norms of queries and keys differs."""

    attention_class = Qwen3Attention
