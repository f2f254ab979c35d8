"""The table of rotary embeddings: plain, linearly scaled, or with Llama 3.1's scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pagebus.actors.model.config import ModelConfig


def rotary_table(config: ModelConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines of every position: [num_positions, head_dim] float32, the halves cos | sin."""
    frequencies = _frequencies(config).to(device)
    angles = torch.arange(num_positions, device=device, dtype=torch.float32).outer(frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per token of each pair of dimensions: [head_dim / 2] float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = torch.pow(config.rope_theta, exponents).reciprocal()
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling["rope_type"] == "linear":
        return plain / float(scaling["factor"])
    return _llama3_frequencies(plain, scaling)


def _llama3_frequencies(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Waves that went round often in the first training stay, slow ones are stretched, those between are blended."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    length = scaling["original_max_position_embeddings"]
    waves = 2 * math.pi / plain
    share = (length / waves - low) / (high - low)
    blended = (1 - share) * plain / factor + share * plain
    stretched = torch.where(waves > length / low, plain / factor, blended)
    return torch.where(waves < length / high, plain, stretched)
