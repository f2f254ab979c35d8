"""Reports of pulls are kept for a bus that loses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec import structs

from pagebus.actors.executor.moves.reports import MOST, PullReports
from pagebus.bus.messages import BlockPull, PullReport
from tests.actors.executor.test_actor import NAME, NAMES, empty_plan, settings, world
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference
from tests.helpers.waiting import LIMIT_S


def report(pull: int, epoch: int, error: str = "") -> PullReport:
    return PullReport(
        replica="", executor_epoch=0, scheduler_epoch=epoch, pull=pull, there=not error, error=error
    )  # fmt: skip


def test_those_for_the_newest_scheduler_are_said_again() -> None:
    reports = PullReports()
    assert not reports.note(report(1, epoch=1))
    for pull in (1, 2):
        assert reports.note(report(pull, epoch=2, error="gone"))
    assert [(each.scheduler_epoch, each.pull) for each in reports.take()] == [(2, 1), (2, 2)]
    assert reports.take() == []


def test_the_oldest_are_forgotten() -> None:
    reports = PullReports()
    for pull in range(MOST + 2):
        reports.note(report(pull, epoch=1))
    assert [each.pull for each in reports.take()] == list(range(2, MOST + 2))


async def test_what_the_bus_may_have_lost_is_repeated(tmp_path: Path) -> None:
    """Or its pull would hold blocks for as long as the executor lives."""
    async with world(settings(make_reference(tmp_path, REFERENCE_CONFIGS[0]))) as running:
        await running.until_state("ready")
        pull, one = BlockPull(pull=7, address="nowhere", num_blocks=1), np.ones(1, np.int32)
        await running.bus.create_group(NAMES.control, "reader")
        plan = structs.replace(empty_plan(), pulls=(pull,), pull_sources=one, pull_blocks=one)
        await running.send(plan, epoch=1)
        for _ in range(2):
            (entry,) = await running.bus.read_group("reader", "me", [NAMES.control], block_ms=int(1000 * LIMIT_S))
            assert isinstance(entry.message, PullReport)
            assert (entry.message.pull, entry.message.replica, entry.message.there) == (7, NAME, False)
            running.actor.bus_restarted()
