"""`SamplingParams`: vLLM's defaults, and what is refused when they are made."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
import pytest

from pagebus import BeamSearchParams, PoolingParams, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams


def test_defaults() -> None:
    """What vLLM has where nothing is given."""
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.seed) == (16, 0, None, None)
    assert "stop" not in params.to_request()


def test_what_is_sent() -> None:
    """Tuples and numbers as keys become what JSON has."""
    sent = SamplingParams(stop=("a",), stop_token_ids=(1,), logit_bias={5: 1.5}, structured_outputs={"choice": ["x"]})
    fields = sent.to_request()
    assert (fields["stop"], fields["stop_token_ids"], fields["logit_bias"]) == (["a"], [1], {"5": 1.5})
    assert fields["structured_outputs"] == {"choice": ["x"]}
    assert "detokenize" not in fields
    detection = RepetitionDetectionParams(max_pattern_size=3, min_count=2)
    fields = SamplingParams(logprob_token_ids=(3, 4), detokenize=False, repetition_detection=detection,
                            thinking_token_budget=0).to_request()  # fmt: skip
    assert (fields["logprobs"], fields["logprob_token_ids"], fields["detokenize"]) == (0, [3, 4], False)
    assert fields["thinking_token_budget"] == 0
    assert fields["repetition_detection"] == {"max_pattern_size": 3, "min_pattern_size": 0, "min_count": 2}


def test_structured_outputs() -> None:
    """As vLLM's class, or as a mapping; what stands beside the constraint is sent with it."""
    given = StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True)
    wanted = {"json": {"type": "object"}, "disable_any_whitespace": True}
    assert SamplingParams(structured_outputs=given).to_request()["structured_outputs"] == wanted
    assert SamplingParams(structured_outputs=wanted).to_request()["structured_outputs"] == wanted
    for wrong in ({}, {"json": "{}", "regex": "a"}, {"json_object": False}):
        with pytest.raises(ValueError, match="structured_outputs must be one of json, regex"):
            StructuredOutputsParams(**wrong)


def test_numbers_of_numpy() -> None:
    """As those of a sweep over temperatures: they are numbers, and go over the wire as such."""
    params = SamplingParams(
        temperature=np.float32(0.5), top_p=np.float64(0.9), max_tokens=np.int64(5), seed=np.uint8(7), top_k=np.int32(3)
    )
    sent = orjson.loads(orjson.dumps(params.to_request(), option=orjson.OPT_SERIALIZE_NUMPY))
    assert [sent[name] for name in ("temperature", "top_p", "max_tokens", "seed", "top_k")] == [0.5, 0.9, 5, 7, 3]
    for wrong in (np.float64(2.5), np.float64("nan"), np.bool_(True)):
        with pytest.raises(ValueError, match="temperature must be"):
            SamplingParams(temperature=wrong)


def test_beams() -> None:
    """As the API has them; what changes the model's own log probabilities is refused."""
    sent = BeamSearchParams(beam_width=3, max_tokens=5).to_request()
    assert (sent["use_beam_search"], sent["n"], sent["max_tokens"], sent["temperature"]) == (True, 3, 5, 0.0)
    for field, value in (("temperature", 0.5), ("beam_width", 0), ("length_penalty", 11)):
        with pytest.raises(ValueError, match=f"^{field} must be "):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, field: value})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ((-1, 0, 2), "max_pattern_size"),
        ((2, 3, 2), "min_pattern_size"),
        ((2, 1, 1), "min_count"),
        ((2, 1), "min_count"),
    ],
)
def test_repetitions_that_are_refused(given: tuple[int, ...], field: str) -> None:
    """By their names."""
    with pytest.raises(ValueError, match=field):
        RepetitionDetectionParams(*given)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("temperature", math.nan),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", 1.5),
        ("truncate_prompt_tokens", 0),
        ("truncation_side", "middle"),
        ("best_of", 0),
        ("logprob_token_ids", [1] * 129),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("structured_outputs", {"json": {}, "regex": "a"}),
    ],
)
def test_out_of_range(field: str, value: Any) -> None:
    """The error names the field and the value."""
    with pytest.raises(ValueError, match=f"^{field} must be "):
        SamplingParams(**{field: value})
    with pytest.raises(ValueError, match=r"^stop must be "):
        SamplingParams(stop="a", detokenize=False)


@pytest.mark.parametrize(("field", "value"), [("dimensions", 0), ("dimensions", 1.5), ("truncate_prompt_tokens", -2)])
def test_pooling_that_is_refused(field: str, value: object) -> None:
    """By its name."""
    with pytest.raises(ValueError, match=field):
        PoolingParams(**{field: value})  # type: ignore[arg-type]
