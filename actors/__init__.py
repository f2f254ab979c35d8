"""Pagebus's actors; and for programs `LLM` and what belongs to it, imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.offline.llm import LLM
    from actors.offline.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, Logprob, RequestOutput
    from actors.offline.params import PoolingParams, SamplingParams

__all__ = [
    "LLM", "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "Logprob", "PoolingParams", "RequestOutput",
    "SamplingParams",
]  # fmt: skip
_MODULES = {
    "LLM": "actors.offline.llm",
    "CompletionOutput": "actors.offline.outputs",
    "EmbeddingOutput": "actors.offline.outputs",
    "EmbeddingRequestOutput": "actors.offline.outputs",
    "Logprob": "actors.offline.outputs",
    "PoolingParams": "actors.offline.params",
    "RequestOutput": "actors.offline.outputs",
    "SamplingParams": "actors.offline.params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
