"""What the way between two replicas is worth: what wrong choices cost in the long run, and what is learned."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pagebus.actors.scheduler.kv.prompt_rate import PromptRate
from pagebus.actors.scheduler.kv.read_rate import TRY_SHARE, ReadRate
from pagebus.actors.scheduler.moves.link import BESIDE_S, PROBE_BYTES, Link

BLOCK_BYTES, BLOCK, TOKENS, PROMPTS = 1 << 19, 16, 1024, 3000
PROBE = PROBE_BYTES // BLOCK_BYTES
COMPUTED_PER_S = 4000.0
COMPUTING_S = TOKENS / COMPUTED_PER_S
NUM_BLOCKS = TOKENS // BLOCK


def new_link() -> Link:
    return Link(ReadRate(BLOCK_BYTES, PromptRate(COMPUTED_PER_S)), BLOCK_BYTES)


def ask(link: Link, pull_s: float) -> float:
    """A prompt of which a pull would take so long; how long it takes, in seconds, with a probe if there is one."""
    bytes_per_s = NUM_BLOCKS * BLOCK_BYTES / (pull_s - BESIDE_S)
    taken_s = 0.0
    while (count := link.room(NUM_BLOCKS, link.saves(NUM_BLOCKS, TOKENS, 0))) > 0:
        link.begin(count)
        link.num_under_way -= count
        probes = count < NUM_BLOCKS
        link.ended(count, there=True, bytes_per_s=bytes_per_s, probes=probes)
        taken_s += count * BLOCK_BYTES / bytes_per_s + BESIDE_S
        if not probes:
            return taken_s
    link.decline(TOKENS)
    return taken_s + COMPUTING_S


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 1.3, 2.0, 4.0, 8.0, 40.0])
def test_choices_cost_little_in_the_long_run(ratio: float) -> None:
    """``ratio``: of the time of a pull to that of computing. The mean time is within 5% of the better way's, although
    slow links are tried again."""
    link = new_link()
    ask(link, ratio * COMPUTING_S)
    times_s = [ask(link, ratio * COMPUTING_S) for _ in range(PROMPTS)]
    assert sum(times_s) / PROMPTS <= 1.05 * min(ratio, 1.0) * COMPUTING_S


def test_nothing_but_a_probe_goes_over_an_unknown_link() -> None:
    """Together, all pulls are no larger."""
    link = new_link()
    assert link.is_unknown
    assert link.room(NUM_BLOCKS, TOKENS) == PROBE
    link.begin(1)
    assert link.room(NUM_BLOCKS, TOKENS) == PROBE - 1
    link.begin(PROBE)
    assert link.room(NUM_BLOCKS, TOKENS) == 0


def test_a_probe_that_is_over_at_once_tells_that_the_link_is_fast() -> None:
    """It took mostly what any copy takes. The next pull tells the rate."""
    link = new_link()
    link.ended(PROBE, there=True, bytes_per_s=PROBE_BYTES / 0.0009, probes=True)
    assert (link.is_unknown, link.cost_tokens(NUM_BLOCKS)) == (False, 0)
    assert link.room(NUM_BLOCKS, TOKENS) == NUM_BLOCKS
    link.ended(NUM_BLOCKS, there=True, bytes_per_s=25e10)
    assert link.bytes_per_s == 25e10


@pytest.mark.parametrize("slow", [2.0, 8.0])
def test_a_link_that_was_slow_is_tried_again(slow: float) -> None:
    """It is used from then on, and the wait is in proportion to what a probe costs."""
    link = new_link()
    ask(link, slow * COMPUTING_S)
    probe = link.cost_tokens(PROBE)
    times_s = [ask(link, 0.2 * COMPUTING_S) for _ in range(PROMPTS)]
    computed = next(number for number, each in enumerate(times_s) if each < COMPUTING_S)
    assert computed == pytest.approx(probe / (TRY_SHARE * TOKENS), abs=2)
    assert all(each < COMPUTING_S / 2 for each in times_s[computed + 1 :])


def test_a_link_that_stays_slow_is_tried_seldom() -> None:
    """Tries are equally far apart: none makes the next one come sooner."""
    link = new_link()
    times_s = [ask(link, 4.0 * COMPUTING_S) for _ in range(PROMPTS)]
    tries = [number for number, each in enumerate(times_s) if each > COMPUTING_S]
    gaps = {after - before for before, after in pairwise(tries[1:])}
    assert len(tries) > 10
    assert max(gaps) - min(gaps) <= 1


def test_computing_is_as_fast_as_the_device_has_shown() -> None:
    """A pull that does not pay by the rate of startup does, where prompts turn out to take longer."""
    prompts = PromptRate(COMPUTED_PER_S)
    link = Link(ReadRate(BLOCK_BYTES, prompts), BLOCK_BYTES)
    ask(link, 1.5 * COMPUTING_S)
    assert link.saves(NUM_BLOCKS, TOKENS, 0) <= 0
    for number in range(5):
        prompts.planned(TOKENS)
        prompts.done(10.0 * number, 10.0 * number + 2 * COMPUTING_S)
    assert link.saves(NUM_BLOCKS, TOKENS, 0) > 0


def test_a_block_larger_than_a_probe_is_one() -> None:
    large = PROBE_BYTES * 3
    assert Link(ReadRate(large, PromptRate(COMPUTED_PER_S)), large).room(512, 8192) == 1
