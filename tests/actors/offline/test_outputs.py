"""Reading the API's answer."""

from __future__ import annotations

import math

from pagebus import Logprob
from pagebus.actors.offline.outputs import read_output


def test_ranks() -> None:
    """A token that is not among the most likely ones has no rank; one that is keeps its place."""
    tops = [
        {"token_id:7": -2.0, "token_id:1": -0.5, "token_id:2": -1.0},
        {"token_id:2": -1.0, "token_id:1": -0.5},
        {"token_id:2": -0.1, "token_id:3": -9999.0},
    ]
    choice = {
        "index": 0,
        "text": "abc",
        "token_ids": [7, 2, 2],
        "prompt_token_ids": [5],
        "logprobs": {"token_logprobs": [-2.0, -1.0, -0.1], "top_logprobs": tops},
        "finish_reason": "length",
    }
    told = read_output(3, None, 2, {"choices": [choice], "usage": {}}, str).outputs[0]
    assert told.cumulative_logprob == -3.1
    assert told.logprobs == [
        {7: Logprob(-2.0, None, "7"), 1: Logprob(-0.5, 1, "1"), 2: Logprob(-1.0, 2, "2")},
        {2: Logprob(-1.0, 2, "2"), 1: Logprob(-0.5, 1, "1")},
        {2: Logprob(-0.1, 1, "2"), 3: Logprob(-math.inf, 2, "3")},
    ]
