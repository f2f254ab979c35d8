"""The one installed name: the four packages, and `LLM` with its types, which are imported on first use.

In the repository the four packages stand beside this folder, which links to them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagebus.actors.offline.adapters import (
        LoRARequest,
    )
    from pagebus.actors.offline.llm import (
        LLM,
    )
    from pagebus.actors.offline.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from pagebus.actors.offline.params import (
        BeamSearchParams,
        PoolingParams,
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]
_MODULES = {
    "LLM": "pagebus.actors.offline.llm",
    "BeamSearchOutput": "pagebus.actors.offline.outputs",
    "BeamSearchParams": "pagebus.actors.offline.params",
    "BeamSearchSequence": "pagebus.actors.offline.outputs",
    "ClassificationOutput": "pagebus.actors.offline.outputs",
    "ClassificationRequestOutput": "pagebus.actors.offline.outputs",
    "CompletionOutput": "pagebus.actors.offline.outputs",
    "EmbeddingOutput": "pagebus.actors.offline.outputs",
    "EmbeddingRequestOutput": "pagebus.actors.offline.outputs",
    "LoRARequest": "pagebus.actors.offline.adapters",
    "Logprob": "pagebus.actors.offline.outputs",
    "PoolingParams": "pagebus.actors.offline.params",
    "RepetitionDetectionParams": "pagebus.actors.offline.params",
    "RequestOutput": "pagebus.actors.offline.outputs",
    "SamplingParams": "pagebus.actors.offline.params",
    "ScoringOutput": "pagebus.actors.offline.outputs",
    "ScoringRequestOutput": "pagebus.actors.offline.outputs",
    "StructuredOutputsParams": "pagebus.actors.offline.params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
