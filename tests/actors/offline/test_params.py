"""`SamplingParams`: vLLM's defaults, and what is refused when they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from actors import PoolingParams, SamplingParams


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
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", 0),
        ("detokenize", False),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("structured_outputs", {"json": {}, "regex": "a"}),
    ],
)
def test_out_of_range(field: str, value: Any) -> None:
    """The error names the field and the value."""
    with pytest.raises(ValueError, match=f"^{field} must be "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("dimensions", 0), ("dimensions", 1.5), ("truncate_prompt_tokens", -2)])
def test_pooling_that_is_refused(field: str, value: object) -> None:
    """By its name."""
    with pytest.raises(ValueError, match=field):
        PoolingParams(**{field: value})  # type: ignore[arg-type]
