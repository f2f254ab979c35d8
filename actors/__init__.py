"""Pagebus's actors; and for programs `LLM` and what belongs to it, imported when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.offline.llm import (
        LLM,
    )
    from actors.offline.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from actors.offline.params import (
        BeamSearchParams,
        PoolingParams,
        RepetitionDetectionParams,
        SamplingParams,
    )

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
]
_MODULES = {
    "LLM": "actors.offline.llm",
    "BeamSearchOutput": "actors.offline.outputs",
    "BeamSearchParams": "actors.offline.params",
    "BeamSearchSequence": "actors.offline.outputs",
    "CompletionOutput": "actors.offline.outputs",
    "EmbeddingOutput": "actors.offline.outputs",
    "EmbeddingRequestOutput": "actors.offline.outputs",
    "Logprob": "actors.offline.outputs",
    "PoolingParams": "actors.offline.params",
    "RepetitionDetectionParams": "actors.offline.params",
    "RequestOutput": "actors.offline.outputs",
    "SamplingParams": "actors.offline.params",
    "ScoringOutput": "actors.offline.outputs",
    "ScoringRequestOutput": "actors.offline.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
