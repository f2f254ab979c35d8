"""The rate of tokens while nearly all clients wait for an answer."""

from __future__ import annotations

import pytest

from pagebus.actors.bench.driver.client import Outcome
from pagebus.actors.bench.measures.full_load import full_load, under_way


def call(sent_s: float, first_s: float, last_s: float, tokens: int) -> Outcome:
    return Outcome(0, sent_s, first_s, last_s, output_tokens=tokens)


def test_a_long_tail_does_not_count() -> None:
    """Two clients; the first sends again at once. After 4 s only one call is left, which lasts until 100."""
    outcomes = [call(0, 1, 2, 11), call(2, 3, 4, 11), call(0, 0, 100, 101)]
    assert under_way(outcomes) == (0, 4)
    rate, seconds = full_load(outcomes)
    assert seconds == 4
    assert rate == pytest.approx((11 + 11 + 1 + 4) / 4)


def test_an_end_and_the_next_beginning_are_no_gap() -> None:
    """A client's next call is sent at the very time at which its last one ended, or a little later."""
    outcomes = [call(0, 0, 2, 21), call(2, 2, 4, 21), call(0, 0, 3, 31), call(3.1, 3.1, 5, 20)]
    assert under_way(outcomes) == (0, 4)


def test_calls_that_never_overlap() -> None:
    rate, seconds = full_load([call(0, 0, 1, 11), call(2, 2, 3, 11)])
    assert (rate, seconds) == (pytest.approx(22 / 3), 3)


def test_calls_of_no_length() -> None:
    assert full_load([call(1, 1, 1, 1)]) == (0.0, 0.0)
