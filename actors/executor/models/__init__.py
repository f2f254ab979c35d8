"""The model that computes every family, and one for tests."""

from __future__ import annotations

from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.models.build import build_model
from pagebus.actors.executor.models.network import Network as Model

__all__ = ["AttentionBatch", "Model", "Tokens", "build_model"]
