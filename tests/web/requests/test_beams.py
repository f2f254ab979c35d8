"""The fields of a beam search, and what cannot be had beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from pagebus.bus.codec import decode, encode
from pagebus.bus.messages import SamplingParams
from pagebus.web.http.errors import ApiError
from pagebus.web.requests.beams import NOT_BESIDE
from pagebus.web.requests.openai import parse_chat, parse_completion
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.served_model import ServedModel

MODEL = ServedModel(names=("m",), vocab_size=1000, max_model_len=64)


def completion(model: ServedModel = MODEL, **body: Any) -> ParsedRequest:
    return parse_completion({"prompt": "x", "use_beam_search": True, **body}, model)


def chat(model: ServedModel = MODEL, **body: Any) -> ParsedRequest:
    messages = [{"role": "user", "content": "hi"}]
    return parse_chat({"messages": messages, "use_beam_search": True, **body}, model)


def refused(parse: Any, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**body)
    assert caught.value.status == 400
    return caught.value


def test_defaults() -> None:
    """vLLM's: as many beams as choices, scores per token, and the search may end before max_tokens."""
    expected = SamplingParams(n=1, beam_width=1, temperature=0.0, length_penalty=1.0, early_stopping=False)
    assert completion().sampling == structs.replace(expected, max_tokens=16)
    assert chat().sampling == structs.replace(expected, max_tokens=None)
    assert parse_completion({"prompt": "x"}, MODEL).sampling.beam_width == 0


def test_width() -> None:
    """n, or best_of where it is more; bounded by the server's setting. The search itself leaves n choices."""
    parsed = completion(n=2, best_of=4)
    assert (parsed.sampling.n, parsed.sampling.beam_width, parsed.sampling.logprobs) == (2, 4, None)
    assert chat(n=3).sampling.beam_width == 3
    for parse in (completion, chat):
        assert parse(n=16).sampling.beam_width == 16
        assert refused(parse, n=17).param == "n"
    assert refused(completion, n=2, best_of=17).param == "best_of"
    assert "--max-beam-width" in refused(completion, n=17).message
    assert completion(replace(MODEL, max_beam_width=20), n=17).sampling.beam_width == 17


@pytest.mark.parametrize(
    ("name", "value"),
    [("length_penalty", 0), ("length_penalty", -10), ("length_penalty", 10), ("length_penalty", 0.7),
     ("early_stopping", True), ("early_stopping", False), ("early_stopping", "never"), ("min_tokens", 3),
     ("stop_token_ids", [5]), ("include_stop_str_in_output", True), ("ignore_eos", True)],
)  # fmt: skip
def test_values_reach_the_bus(name: str, value: Any) -> None:
    """On both routes."""
    for parsed in (completion(**{name: value}), chat(**{name: value})):
        (message,) = parsed.messages_for_bus(["id"], "i", 0.0)
        told = getattr(decode(encode(message)).sampling, name)
        assert told == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("length_penalty", 10.1), ("length_penalty", -11), ("length_penalty", "1"), ("length_penalty", float("nan")),
     ("early_stopping", 1), ("early_stopping", "always"), ("use_beam_search", 1), ("n", 0)],
)  # fmt: skip
def test_bad_values(name: str, value: Any) -> None:
    """Out of range, or of a wrong type."""
    for parse in (completion, chat):
        assert refused(parse, **{name: value}).param == name


NOT_NEUTRAL = {
    "stream": True, "temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.1,
    "logit_bias": {"5": 1}, "bad_words": ["x"], "allowed_token_ids": [5], "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "stop": "x", "prompt_logprobs": 1, "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_BESIDE)
def test_not_beside_a_search(name: str) -> None:
    """A 400 that says why; values that ask for nothing, and null, are taken."""
    neutral, reason = NOT_BESIDE[name]
    for parse in (completion, chat):
        error = refused(parse, **{name: NOT_NEUTRAL[name]})
        assert (error.param, reason in error.message) == (name, True)
        for value in (*neutral, None):
            assert parse(**{name: value}).sampling == parse().sampling


def test_the_prompts_log_probabilities_are_not_told() -> None:
    """The prompt itself may be echoed."""
    assert completion(echo=True).sampling.echo
    assert refused(completion, echo=True, logprobs=1).param == "echo"


def test_the_models_own_defaults_are_left_aside() -> None:
    """A model that is usually sampled from is searched all the same."""
    model = replace(MODEL, default_sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1})
    assert completion(model).sampling == completion().sampling


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 1.5), ("early_stopping", True)])
def test_only_for_a_search(name: str, value: Any) -> None:
    """Without use_beam_search these would mean nothing; their defaults may be given."""
    for parse in (completion, chat):
        assert refused(parse, use_beam_search=False, **{name: value}).param == name
        plain = parse(use_beam_search=False, length_penalty=1, early_stopping=False)
        assert plain.sampling == parse(use_beam_search=None).sampling
