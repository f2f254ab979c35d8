"""Outputs of `LLM` with vLLM's names, read from the API's answers."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagebus.actors.offline.adapters import LoRARequest

LOWEST = -9999.0
"""Stands for minus infinity in the API, which JSON cannot express."""
ID_PREFIX = "token_id:"


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token at one place. ``rank``: 1 is the most likely token; None where it is not known,
    because the token is not among the most likely ones that were requested."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output. ``stop_reason``: the stop string or the id of the stop token that ended it, None: neither."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None

    def finished(self) -> bool:
        """Always true here: outputs are returned when they are done."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its outputs. ``prompt`` is None if it was given as token ids. The first entry of
    ``prompt_logprobs`` is None: nothing comes before it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int | None = None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """``embedding``: a vector of length 1, in float32."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of its dimensions."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt, as far as it counted, and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """``probs``: of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """A prompt and its labels."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How relevant one text is to another, or how alike they are: the cosine of the angle between their embeddings, -1
    to 1."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score; ``prompt_token_ids`` are those of both, one after the other, or empty where a
    reranker reads them as one prompt."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam: ``tokens`` and ``text`` are the prompt and what was found, ``logprobs`` one entry per found token, its
    own, and ``cum_logprob`` their sum. A token that ends it has its log probability, but is no text."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """All beams of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


def score_of(number: int, first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """Of two embeddings of length 1."""
    told = [first.num_cached_tokens, second.num_cached_tokens]
    return ScoringRequestOutput(
        request_id=str(number),
        outputs=ScoringOutput(float(np.dot(first.outputs.embedding, second.outputs.embedding))),
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        num_cached_tokens=sum(count or 0 for count in told),
    )


def beams_of(found: RequestOutput, *, with_end: bool, decode: Callable[[Sequence[int]], str]) -> BeamSearchOutput:
    """From the outputs of a search. ``with_end``: a token that ended a beam is one of its tokens."""
    beams = []
    for output in found.outputs:
        ended = output.finish_reason == "stop" and not with_end
        tokens = [*found.prompt_token_ids, *(output.token_ids[:-1] if ended else output.token_ids)]
        beams.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=output.logprobs or [],
                cum_logprob=output.cumulative_logprob or 0.0,
                text=decode(tokens),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
        )
    return BeamSearchOutput(beams)


def read_embedding(number: int, prompt_token_ids: list[int], answer: Mapping[str, Any]) -> EmbeddingRequestOutput:
    """From the answer of ``/v1/embeddings`` for one prompt, in base64."""
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    details = answer["usage"].get("prompt_tokens_details") or {}
    return EmbeddingRequestOutput(
        request_id=str(number),
        outputs=EmbeddingOutput(vector.tolist()),
        prompt_token_ids=prompt_token_ids,
        num_cached_tokens=details.get("cached_tokens"),
    )


def read_score(number: int, answer: Mapping[str, Any]) -> ScoringRequestOutput:
    """From the answer of ``/v1/score`` for one pair."""
    return ScoringRequestOutput(str(number), ScoringOutput(answer["data"][0]["score"]), [])


def read_classes(number: int, prompt_token_ids: list[int], answer: Mapping[str, Any]) -> ClassificationRequestOutput:
    """From the answer of ``/classify`` for one prompt."""
    return ClassificationRequestOutput(str(number), ClassificationOutput(answer["data"][0]["probs"]), prompt_token_ids)


def read_output(
    number: int, prompt: str | None, num_top: int | None, answer: Mapping[str, Any], decode: Callable[[int], str]
) -> RequestOutput:
    """From the answer of ``/v1/completions`` for one prompt, with token ids, and tokens called by their ids.
    ``num_top``: how many of the most likely tokens it was asked for; None: for others, whose rank is not known."""
    choices = answer["choices"]
    told = choices[0].get("prompt_logprobs")
    details = answer["usage"].get("prompt_tokens_details") or {}
    return RequestOutput(
        request_id=str(number),
        prompt=prompt,
        prompt_token_ids=choices[0]["prompt_token_ids"],
        prompt_logprobs=None if told is None else [None if each is None else _of_prompt(each) for each in told],
        outputs=[_choice(choice, num_top, decode) for choice in choices],
        num_cached_tokens=details.get("cached_tokens"),
    )


def _choice(choice: Mapping[str, Any], num_top: int | None, decode: Callable[[int], str]) -> CompletionOutput:
    told = choice["logprobs"]
    own = None if told is None else [_finite(value) for value in told["token_logprobs"]]
    return CompletionOutput(
        index=choice["index"],
        text=choice["text"],
        token_ids=choice["token_ids"],
        cumulative_logprob=None if own is None else sum(own),
        logprobs=None if told is None else _of_output(choice["token_ids"], told["top_logprobs"], num_top, decode),
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
    )


def _of_prompt(told: Mapping[str, Mapping[str, Any]]) -> TokenLogprobs:
    return {
        int(token_id): Logprob(_finite(each["logprob"]), each["rank"], each["decoded_token"])
        for token_id, each in told.items()
    }


def _of_output(
    token_ids: Sequence[int], tops: Sequence[Mapping[str, float]], num_top: int | None, decode: Callable[[int], str]
) -> list[TokenLogprobs]:
    """Of each token: the token itself, and the ``num_top`` most likely ones, which it may be among."""
    found = []
    for token_id, named in zip(token_ids, tops, strict=True):
        values = {int(name.removeprefix(ID_PREFIX)): _finite(value) for name, value in named.items()}
        ranked = [] if num_top is None else sorted(values, key=lambda each: -values[each])
        if num_top is not None and len(values) > num_top:
            ranked.remove(token_id)
        ranks = {each: rank for rank, each in enumerate(ranked, 1)}
        found.append({each: Logprob(value, ranks.get(each), decode(each)) for each, value in values.items()})
    return found


def _finite(value: float) -> float:
    return -math.inf if value <= LOWEST else value
