"""The model definitions, one file per architecture family, and the table that finds them."""

from __future__ import annotations

from actors.executor.layers.attention import AttentionBatch
from actors.executor.models.llama import LlamaModel as Model
from actors.executor.models.llama import Piece, Tokens
from actors.executor.models.registry import MODELS, build_model

__all__ = ["MODELS", "AttentionBatch", "Model", "Piece", "Tokens", "build_model"]
