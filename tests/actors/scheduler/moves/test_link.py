"""What a link is thought to be worth, from its first pull on."""

from __future__ import annotations

import pytest

from pagebus.actors.scheduler.kv.read_rate import ReadRate
from pagebus.actors.scheduler.moves.link import PROBE_BYTES, Link

BLOCK_BYTES, BLOCK_SIZE, PREFILL = 1 << 21, 16, 44_000.0
PROBE = PROBE_BYTES // BLOCK_BYTES
PROMPT = 512, 512 * BLOCK_SIZE
BREAK_EVEN = BLOCK_BYTES / BLOCK_SIZE * PREFILL


def new_link(bytes_per_s: float = 0.0) -> Link:
    """Of an 8B model, after a probe."""
    link = Link(ReadRate(BLOCK_BYTES, PREFILL), BLOCK_BYTES)
    if bytes_per_s:
        link.ended(PROBE, there=True, bytes_per_s=bytes_per_s, probes=True)
    return link


def test_nothing_but_a_probe_goes_over_an_unknown_link() -> None:
    """Together, all pulls are no larger."""
    link = new_link()
    assert link.saves(*PROMPT) > 0
    assert link.room(*PROMPT) == PROBE
    link.num_under_way = 1
    assert link.room(*PROMPT) == PROBE - 1
    link.num_under_way = 9
    assert link.room(*PROMPT) == 0


@pytest.mark.parametrize(("rate", "pays"), [(BREAK_EVEN * 0.9, False), (BREAK_EVEN * 1.1, True)])
def test_a_probe_tells_what_pays(rate: float, pays: bool) -> None:
    link = new_link(rate / 4)
    link.ended(PROBE, there=True, bytes_per_s=rate * 7 / 4)  # on average
    assert (link.saves(*PROMPT) > 0) is pays
    assert not pays or link.room(*PROMPT) is None


def test_a_probe_that_is_over_at_once_tells_that_the_link_is_fast() -> None:
    """It took mostly what any copy takes. The next pull tells the rate."""
    link = new_link(PROBE_BYTES / 0.0009)
    assert link.cost_tokens(512) == 0
    assert link.room(*PROMPT) is None
    link.ended(512, there=True, bytes_per_s=25e10)
    assert link.cost_tokens(512) == pytest.approx((512 * BLOCK_BYTES / 25e10 + 0.001) * PREFILL)


def test_a_slow_link_is_probed_again_after_a_while_and_what_was_doubted_is_forgotten() -> None:
    """Each time after the same number of prompts that were computed."""
    link, counts = new_link(BREAK_EVEN / 8), []
    for _ in range(3):
        counts.append(0)
        while link.saves(*PROMPT) <= 0:
            assert counts[-1] < 100
            link.decline()
            counts[-1] += 1
        assert link.room(*PROMPT) == PROBE
        link.ended(PROBE, there=True, bytes_per_s=BREAK_EVEN / 8, probes=True)
    assert counts == [counts[0]] * 3
    assert counts[0] > 40


def test_a_block_larger_than_a_probe_is_one() -> None:
    assert Link(ReadRate(PROBE_BYTES * 3, PREFILL), PROBE_BYTES * 3).room(512, 8192) == 1
