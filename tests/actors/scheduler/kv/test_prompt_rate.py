"""The rate of prompts: from startup, then from long steps of prompts alone."""

from __future__ import annotations

import pytest

from pagebus.actors.scheduler.kv.prompt_rate import LEAST_TOKENS, PromptRate


def run(rate: PromptRate, *steps: tuple[int, float], begin_s: float = 0.0) -> None:
    """Steps one after another: tokens, and seconds."""
    for num_tokens, seconds in steps:
        rate.planned(num_tokens)
        rate.done(begin_s, begin_s := begin_s + seconds)


def test_the_first_is_that_of_startup() -> None:
    assert PromptRate(500.0).tokens_per_s == 500.0


def test_long_steps_count_more_than_startup() -> None:
    """One of 1000 tokens already, and ten of them nearly alone."""
    rate = PromptRate(500.0)
    run(rate, (1000, 1.0))
    assert 750.0 < rate.tokens_per_s < 1000.0
    run(rate, *[(1000, 1.0)] * 10)
    assert rate.tokens_per_s == pytest.approx(1000.0, rel=0.05)


def test_it_follows_a_device_that_becomes_slower() -> None:
    """Steps are forgotten; longer ones more slowly."""
    rate = PromptRate(1000.0)
    run(rate, *[(1000, 1.0)] * 20, *[(1000, 4.0)] * 30)
    assert rate.tokens_per_s == pytest.approx(250.0, rel=0.05)


@pytest.mark.parametrize("num_tokens", [0, 1, LEAST_TOKENS - 1])
def test_short_steps_and_those_with_decodes_say_nothing(num_tokens: int) -> None:
    rate = PromptRate(500.0)
    run(rate, *[(num_tokens, 3.0)] * 5)
    assert rate.tokens_per_s == 500.0


def test_a_step_that_waited_for_another_took_the_rest() -> None:
    """Both were launched at once."""
    rate = PromptRate(1000.0)
    for _ in range(2):
        rate.planned(1000)
    rate.done(5.0, 6.0)
    rate.done(5.0, 7.0)
    assert rate.tokens_per_s == pytest.approx(1000.0)


def test_clocks_that_stand_still_say_nothing() -> None:
    rate = PromptRate(500.0)
    run(rate, (1000, 0.0), (1000, -1.0))
    assert rate.tokens_per_s == 500.0


def test_what_was_not_measured_at_startup_stays_unknown() -> None:
    """Then nothing is compared: what can be read is read."""
    rate = PromptRate(0.0)
    run(rate, (1000, 1.0))
    assert rate.tokens_per_s == 0.0
