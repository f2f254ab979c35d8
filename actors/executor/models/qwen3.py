"""Qwen3: Llama whose queries and keys are normalised head by head before they are rotated."""

from __future__ import annotations

import torch

from actors.executor.layers.attention import Attention
from actors.executor.layers.parameters import Parameters
from actors.executor.models.llama import LlamaModel
from actors.executor.ops import Ops
from actors.model_config import ModelConfig


class Qwen3Attention(Attention):
    """Attention with norms over the head dimension."""

    def __init__(
        self, config: ModelConfig, layer: int, parameters: Parameters, prefix: str, ops: Ops, rotary: torch.Tensor
    ) -> None:
        super().__init__(config, layer, parameters, prefix, ops, rotary)
        self.norms = {
            "q_norm": parameters.norm(f"{prefix}.q_norm.weight", config.head_dim),
            "k_norm": parameters.norm(f"{prefix}.k_norm.weight", config.head_dim),
            "eps": config.rms_norm_eps,
        }


class Qwen3Model(LlamaModel):
    """Nothing but the norms of queries and keys differs."""

    attention_class = Qwen3Attention
