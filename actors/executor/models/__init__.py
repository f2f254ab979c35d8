"""Model definitions, one file per architecture family, and the table that selects one."""

from __future__ import annotations

from pagebus.actors.executor.layers.attention_batch import AttentionBatch, Tokens
from pagebus.actors.executor.models.llama import LlamaModel as Model
from pagebus.actors.executor.models.registry import MODELS, build_model

__all__ = ["MODELS", "AttentionBatch", "Model", "Tokens", "build_model"]
