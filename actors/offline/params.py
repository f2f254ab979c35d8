"""Sampling parameters with vLLM's names, defaults and meanings, validated on construction."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any

MAX_LOGPROB_TOKEN_IDS = 128
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass
class RepetitionDetectionParams:
    """An output ends when its last tokens are some pattern, ``min_count`` times in a row (2 or more). Patterns have
    ``min_pattern_size`` (0 means 1) to ``max_pattern_size`` tokens; 0 of these asks for nothing.

    Raises:
        ValueError: a field is out of its range; the text names it.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            _check_integer(name, getattr(self, name))
            _check(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        fits = self.min_pattern_size <= self.max_pattern_size
        _check(fits, "min_pattern_size", f"at most max_pattern_size ({self.max_pattern_size})", self.min_pattern_size)
        _check(self.max_pattern_size == 0 or self.min_count >= 2, "min_count", "at least 2", self.min_count)


@dataclass
class StructuredOutputsParams:
    """What an output has to follow: one of the first six, in the API's forms.

    Raises:
        ValueError: none is given, or several.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        _check_constraints(self.to_request())

    def to_request(self) -> dict[str, Any]:
        """What is given."""
        given = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: value for name, value in given.items() if value is not None and value is not False}


@dataclass(kw_only=True)
class BeamSearchParams:
    """How beams are searched: vLLM's names and defaults.

    Raises:
        ValueError: a field is out of its range; the text names it.
    """

    beam_width: int
    """Number of beams, all of which are returned."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """0 or 1: beams are compared by the model's own log probabilities."""
    length_penalty: float = 1.0
    """-10 to 10; above 0 for longer beams."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            _check_integer(name, getattr(self, name))
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _check(self.temperature in (0, 1), "temperature", "0 or 1", self.temperature)
        _check_range("length_penalty", self.length_penalty, -10, 10)

    def to_request(self) -> dict[str, Any]:
        """The fields of a request."""
        given = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "beam_width"}
        return {**given, "use_beam_search": True, "n": self.beam_width, "logprobs": 0}


@dataclass(kw_only=True)
class SamplingParams:
    """What is not given is as vLLM has it, whatever the model's ``generation_config.json`` says.

    Raises:
        ValueError: a field is out of its range; the text names it.
    """

    n: int = 1
    """Outputs per prompt."""
    presence_penalty: float = 0.0
    """-2 to 2; against tokens that are in the output."""
    frequency_penalty: float = 0.0
    """-2 to 2; against tokens of the output, for each time."""
    repetition_penalty: float = 1.0
    """More than 0; above 1 against tokens of prompt and output."""
    temperature: float = 1.0
    """0 to 2; 0 takes the most likely token."""
    top_p: float = 1.0
    """More than 0, at most 1."""
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    """0 to 1, relative to the most likely token."""
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: what the context holds."""
    min_tokens: int = 0
    logprobs: int | None = None
    """How many of the most likely tokens to report for each output token, at most the model's ``max_logprobs``; -1: the
    whole vocabulary; None: no log probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt."""
    detokenize: bool = True
    """False: outputs have token ids and no text."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    """How many tokens of the prompt count; -1: as many as fit."""
    truncation_side: str | None = None
    """Which of them count: the last ones (``left``, which None is too) or the first (``right``)."""
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """What the output has to follow; a mapping is as in the API: {"choice": ["yes", "no"]}."""
    best_of: int | None = None
    """Number of outputs to generate, of which the ``n`` most likely are returned."""
    logprob_token_ids: Sequence[int] | None = None
    """Tokens whose log probabilities are reported for each output token, in place of the most likely ones; at
    most 128."""
    repetition_detection: RepetitionDetectionParams | None = None
    """When an output that repeats itself is ended; None: never."""
    thinking_token_budget: int | None = None
    """Tokens that reasoning may have, where a model has a ``reasoning_parser``; -1 or None: any number."""

    def __post_init__(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            _check_integer(name, getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "best_of",
                     "thinking_token_budget"):  # fmt: skip
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name))
        _check(self.best_of is None or self.best_of >= self.n, "best_of", f"at least n ({self.n})", self.best_of)
        picked = self.logprob_token_ids or ()
        few = f"at most {MAX_LOGPROB_TOKEN_IDS} tokens"
        _check(len(picked) <= MAX_LOGPROB_TOKEN_IDS, "logprob_token_ids", few, len(picked))
        _check(self.n >= 1, "n", "at least 1", self.n)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_range(name, getattr(self, name), -2, 2)
        _check_range("temperature", self.temperature, 0, 2)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("top_p", self.top_p, 0, 1)
        _check(self.top_p > 0, "top_p", "more than 0", self.top_p)
        _check_range("repetition_penalty", self.repetition_penalty, 0, math.inf)
        _check(self.repetition_penalty > 0, "repetition_penalty", "more than 0", self.repetition_penalty)
        _check(self.top_k >= -1, "top_k", "0 or -1 (all tokens), or at least 1", self.top_k)
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        least = self.max_tokens is None or self.min_tokens <= self.max_tokens
        _check(least, "min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check(getattr(self, name) >= -1, name, "at least 0, or -1", getattr(self, name))
        _check_truncation(self.truncate_prompt_tokens)
        sides = (None, "left", "right")
        _check(self.truncation_side in sides, "truncation_side", "left or right", self.truncation_side)
        _check(self.detokenize or not self.stop, "stop", "None where detokenize is False", self.stop)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        _check("" not in stops, "stop", "without empty strings", self.stop)
        if isinstance(self.structured_outputs, Mapping):
            _check_constraints(self.structured_outputs)

    @property
    def tells_logprobs(self) -> bool:
        """Whether each token comes with log probabilities."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def num_top(self) -> int | None:
        """Alternatives reported per token; None: the listed ones."""
        if self.logprob_token_ids:
            return None
        return sys.maxsize if self.logprobs == -1 else self.logprobs or 0

    def to_request(self) -> dict[str, Any]:
        """The fields of a request; what is None is left out."""
        given = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        if self.detokenize:
            del given["detokenize"]
        if self.logprob_token_ids and self.logprobs is None:
            given["logprobs"] = 0
        if self.repetition_detection is not None:
            given["repetition_detection"] = asdict(self.repetition_detection)
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            given["structured_outputs"] = self.structured_outputs.to_request()
        for name in ("stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids"):
            if given[name] is not None:
                given[name] = list(given[name])
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        if self.stop is not None and not isinstance(self.stop, str):
            given["stop"] = list(self.stop)
        return {name: value for name, value in given.items() if value is not None}


@dataclass(kw_only=True)
class PoolingParams:
    """How an embedding is made; names as in vLLM.

    Raises:
        ValueError: a field is out of its range; the text names it.
    """

    dimensions: int | None = None
    """How many of its numbers are kept, the first ones, scaled to length 1 again; None: all."""
    truncate_prompt_tokens: int | None = None
    """How many tokens of the prompt count, the first ones; -1: as many as fit."""
    use_activation: bool | None = None
    """False: the vector is not scaled to length 1."""

    def __post_init__(self) -> None:
        for name in ("dimensions", "truncate_prompt_tokens"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name))
        _check(self.dimensions is None or self.dimensions >= 1, "dimensions", "at least 1", self.dimensions)
        _check_truncation(self.truncate_prompt_tokens)

    def to_request(self) -> dict[str, Any]:
        """The fields of a request that scores or classifies."""
        given = {"truncate_prompt_tokens": self.truncate_prompt_tokens, "use_activation": self.use_activation}
        return {name: value for name, value in given.items() if value is not None}


def _check_constraints(given: Mapping[str, Any]) -> None:
    count = sum(given.get(name) is not None and given[name] is not False for name in CONSTRAINTS)
    _check(count == 1, "structured_outputs", f"one of {', '.join(CONSTRAINTS)}", dict(given))


def _check_truncation(keep: int | None) -> None:
    _check(keep is None or keep == -1 or keep >= 1, "truncate_prompt_tokens", "at least 1, or -1", keep)


def _check(holds: bool, name: str, wanted: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _check_integer(name: str, value: object) -> None:
    _check(_is(value, Integral), name, "a whole number", value)


def _is(value: Any, kind: type[Any]) -> bool:
    """Whether this is such a number, of Python or of numpy; switches are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_range(name: str, value: object, low: float, high: float) -> None:
    _check(_is(value, Real) and value == value, name, "a number", value)
    text = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
    _check(low <= value <= high, name, text, value)  # type: ignore[operator]
