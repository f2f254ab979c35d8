"""How much of a prediction has come true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebus.actors.detokenizer.prediction import PredictionMatcher
from pagebus.actors.detokenizer.sequences import Sequences
from tests.actors.detokenizer.letters import rows_of, run, started


def counted(prediction: str, output: str) -> tuple[int, int]:
    matcher = PredictionMatcher([ord(each) for each in prediction])
    for each in output:
        matcher.push(ord(each))
    return matcher.num_predicted, matcher.num_unpredicted


@pytest.mark.parametrize(
    ("prediction", "output", "occurred"),
    [
        ("abcdef", "abcdef", 6),
        ("abcdef", "abcdefgh", 6),
        ("abcdef", "abc", 3),
        ("abcdef", "uvwxyz", 0),
        ("abcdefgh", "abXYfgh", 5),  # a place left out, another text in its stead
        ("abcdefgh", "XYZabcdefgh", 8),  # something before
        ("abcdefgh", "efghabcd", 4),  # never backwards
        ("abcabcabd", "abcabd", 5),  # one token is not enough to go on elsewhere
        ("ab", "xab", 2),
    ],
)
def test_tokens_that_occur(prediction: str, output: str, occurred: int) -> None:
    assert counted(prediction, output) == (occurred, len(prediction) - occurred)


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_no_token_counts_twice(prediction: list[int], output: list[int]) -> None:
    matcher = PredictionMatcher(prediction)
    for number, token in enumerate(output, 1):
        matcher.push(token)
        assert 0 <= matcher.num_predicted <= min(number, len(prediction))
        assert matcher.num_predicted + matcher.num_unpredicted == len(prediction)


def test_replies_tell_it(sequences: Sequences) -> None:
    """Beside a choice without a prediction; and nothing is told where nobody has one."""
    prediction = np.array([token for _, token, *_ in rows_of("abcd")], np.int32)
    sequences.start(started(1, prediction_token_ids=prediction))
    sequences.start(started(2))

    reply = run(sequences, [*rows_of("abx"), *rows_of("ab", sequence_id=2)]).replies["in-0"]

    assert (reply.num_predicted.tolist(), reply.num_unpredicted.tolist()) == ([2, 0], [2, 0])
    sequences.start(started(3))
    assert not len(run(sequences, rows_of("ab", sequence_id=3)).replies["in-0"].num_predicted)
