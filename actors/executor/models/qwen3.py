"""Qwen3: Llama whose queries and keys are normalised head by head before they are rotated."""

from __future__ import annotations

import torch

from actors.executor.layers.attention import Attention
from actors.executor.layers.norm import RMSNorm
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
        self.query_norm = RMSNorm(parameters, f"{prefix}.q_norm", config.head_dim, config.rms_norm_eps, ops)
        self.key_norm = RMSNorm(parameters, f"{prefix}.k_norm", config.head_dim, config.rms_norm_eps, ops)

    def prepare(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise each head of q [T, Hq, D] and k [T, Hkv, D]."""
        return self.query_norm(q), self.key_norm(k)


class Qwen3Model(LlamaModel):
    """Nothing but the norms of queries and keys differs."""

    attention_class = Qwen3Attention
