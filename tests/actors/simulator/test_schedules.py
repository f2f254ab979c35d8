"""Random schedules: no leak, no double owner, no starvation, no deadlock, and exactly the right tokens.

400 of them here, the same each time, and 1,000 by ``make grids``; ``make schedules`` runs more, from any seed on (17 ms
of a core each).
What fails names its seed; ``PAGEBUS_TEST_SEED=123 pytest tests/actors/simulator/test_schedules.py`` runs it again.
``PAGEBUS_TEST_SCHEDULES`` is how many are run, and ``PAGEBUS_TEST_FIRST_SEED`` where they begin.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from pagebus.actors.simulator.simulation import HITS
from tests.actors.simulator.random_schedule import run_schedule
from tests.grids import FULL

NUM_SCHEDULES = int(os.environ.get("PAGEBUS_TEST_SCHEDULES", 1000 if FULL else 400))
FIRST_SEED = int(os.environ.get("PAGEBUS_TEST_FIRST_SEED", "0"))
ONLY_SEED = os.environ.get("PAGEBUS_TEST_SEED")
NUM_PARTS = 2 if NUM_SCHEDULES < 1000 else 5
MODES = ("auto", "recompute", "swap")


def run(seed: int) -> Counter[str]:
    """One schedule; what happened in it, counted."""
    try:
        schedule = run_schedule(seed, MODES[seed % len(MODES)])
    except BaseException as error:
        error.add_note(f"the random schedule that failed: PAGEBUS_TEST_SEED={seed}")
        raise
    core, world = schedule.simulation.core, schedule.world
    seen = Counter(preemptions=core.num_preemptions, aborts=len(world.aborted), steps=schedule.simulation.num_steps)
    seen.update(note.event for note in world.notes)
    seen["forks"] = sum(sent.sampling.n > 1 for sent in world.requests.values())
    seen["beams"] = sum(sent.sampling.beam_width > 1 for sent in world.requests.values())
    seen["stops"] = sum(heard.stopped for heard in world.heard.values())
    seen["swaps"] = schedule.simulation.swapped_in
    seen["hits"] = schedule.simulation.totals()[HITS]
    return seen


@pytest.mark.parametrize("part", range(NUM_PARTS if ONLY_SEED is None else 1))
def test_random_schedules(part: int) -> None:
    """Whatever happens in whatever order, every request ends once, with its tokens, and all invariants always hold."""
    if ONLY_SEED is not None:
        run(int(ONLY_SEED))
        return
    seen: Counter[str] = Counter()
    count = NUM_SCHEDULES // NUM_PARTS
    for seed in range(FIRST_SEED + part * count, FIRST_SEED + (part + 1) * count):
        seen.update(run(seed))
    if count >= 200:  # and it did happen
        for what in (
            "preemptions",
            "aborts",
            "forks",
            "beams",
            "stops",
            "hits",
            "swaps",
            "replica left",
            "replica joined",
        ):
            assert seen[what] > count / 100, f"too few {what}: {seen}"
