"""What the way between two replicas is worth: what wrong choices cost in the long run, and what is learned."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pagebus.actors.scheduler.kv.prompt_rate import PromptRate
from pagebus.actors.scheduler.kv.read_rate import TRY_SHARE, ReadRate
from pagebus.actors.scheduler.moves.link import BESIDE_S, Link

BLOCK_BYTES, BLOCK, TOKENS, PROMPTS = 1 << 19, 16, 1024, 3000
COMPUTED_PER_S = 4000.0
COMPUTING_S = TOKENS / COMPUTED_PER_S
NUM_BLOCKS = TOKENS // BLOCK


def new_link() -> Link:
    return Link(ReadRate(BLOCK_BYTES, PromptRate(COMPUTED_PER_S)))


def ask(link: Link, pull_s: float) -> bool:
    """A prompt of which a pull would take so long; whether it is pulled."""
    if link.saves(NUM_BLOCKS, TOKENS, 0) <= 0:
        link.decline(TOKENS)
        return False
    link.begin(NUM_BLOCKS)
    link.num_under_way -= NUM_BLOCKS
    link.ended(there=True, bytes_per_s=NUM_BLOCKS * BLOCK_BYTES / (pull_s - BESIDE_S))
    return True


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 1.3, 2.0, 4.0, 8.0, 40.0])
def test_choices_cost_little_in_the_long_run(ratio: float) -> None:
    """``ratio``: of the time of a pull to that of computing. Behind the first pull, which tells it, the mean time is
    within 5% of the better way's, although slow links are tried again."""
    link = new_link()
    assert ask(link, ratio * COMPUTING_S)
    times = [ratio if ask(link, ratio * COMPUTING_S) else 1.0 for _ in range(PROMPTS)]
    assert sum(times) / PROMPTS <= 1.05 * min(ratio, 1.0)


@pytest.mark.parametrize("slow", [2.0, 8.0])
def test_a_link_that_was_slow_is_tried_again(slow: float) -> None:
    """It is used from then on, and the wait is in proportion to what a try may lose."""
    link = new_link()
    ask(link, slow * COMPUTING_S)
    pulled = [ask(link, 0.2 * COMPUTING_S) for _ in range(PROMPTS)]
    first = pulled.index(True)
    assert (slow - 1) / TRY_SHARE * 0.9 <= first <= (slow - 1) / TRY_SHARE * 1.1
    assert all(pulled[first + 1 :])


def test_a_link_that_stays_slow_is_tried_seldom() -> None:
    """Tries are equally far apart: none makes the next one come sooner."""
    link = new_link()
    pulled = [ask(link, 4.0 * COMPUTING_S) for _ in range(PROMPTS)]
    tries = [number for number, each in enumerate(pulled) if each]
    gaps = {after - before for before, after in pairwise(tries)}
    assert len(tries) > 10
    assert max(gaps) - min(gaps) <= 1


def test_many_prompts_at_once_are_not_all_a_try() -> None:
    """What one try may lose is spent when it begins."""
    link = new_link()
    ask(link, 2.0 * COMPUTING_S)
    while link.saves(NUM_BLOCKS, TOKENS, 0) <= 0:
        link.decline(TOKENS)
    link.begin(NUM_BLOCKS)
    link.num_under_way -= NUM_BLOCKS
    assert link.saves(NUM_BLOCKS, TOKENS, 0) <= 0


def test_computing_is_as_fast_as_the_device_has_shown() -> None:
    """A pull that does not pay by the rate of startup does, where prompts turn out to take longer."""
    prompts = PromptRate(COMPUTED_PER_S)
    link = Link(ReadRate(BLOCK_BYTES, prompts))
    ask(link, 1.5 * COMPUTING_S)
    assert link.saves(NUM_BLOCKS, TOKENS, 0) <= 0
    for number in range(5):
        prompts.planned(TOKENS)
        prompts.done(10.0 * number, 10.0 * number + 2 * COMPUTING_S)
    assert link.saves(NUM_BLOCKS, TOKENS, 0) > 0
