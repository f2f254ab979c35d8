"""What tests of kernels on a GPU share: shapes of real models, and how far a result is from what is expected."""

from __future__ import annotations

import torch

CUDA = "cuda"
SHAPES = {  # query heads, KV heads, head dim, sliding window
    "llama8b": (32, 8, 128, 0),
    "qwen06b": (16, 8, 128, 0),
    "qwen7b": (28, 4, 128, 0),
    "mistral": (32, 8, 128, 700),
    "smollm": (15, 5, 64, 0),
    "phi": (32, 32, 96, 300),
    "head80": (12, 4, 80, 0),
    "gemma": (8, 4, 256, 0),
    "glm4": (32, 2, 128, 0),
    "multiquery": (24, 1, 64, 0),
    "llama70b": (64, 8, 128, 0),
    "gptoss": (64, 8, 64, 128),
    "qwen235b": (64, 4, 128, 0),
}


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN if anything is."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())
