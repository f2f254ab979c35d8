"""Reports are kept for a bus that loses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec import structs

from pagebus.actors.executor.moves.reports import MOST, Reports
from pagebus.bus.messages import AdapterRead, BlockPull, DiskReport, PullReport
from tests.actors.executor.test_actor import NAME, NAMES, empty_plan, settings, world
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference
from tests.helpers.waiting import LIMIT_S


def report(pull: int, epoch: int, error: str = "") -> PullReport:
    return PullReport(
        replica="", executor_epoch=0, scheduler_epoch=epoch, pull=pull, there=not error, error=error
    )  # fmt: skip


def test_those_for_the_newest_scheduler_are_said_again() -> None:
    reports = Reports()
    reports.note(report(1, epoch=1), "gpu-0", 4)
    for pull in (1, 2):
        said = reports.note(report(pull, epoch=2), "gpu-0", 4)
        assert (said.replica, said.executor_epoch) == ("gpu-0", 4)
    assert [(each.scheduler_epoch, each.pull) for each in reports.take() if isinstance(each, PullReport)] == [
        (2, 1), (2, 2),
    ]  # fmt: skip
    assert reports.take() == []


def test_the_oldest_are_forgotten() -> None:
    """Of each kind: many of disks leave those of pulls."""
    reports = Reports()
    for pull in range(MOST + 2):
        reports.note(report(pull, epoch=1), "", 0)
    for _ in range(MOST + 2):
        reports.note(DiskReport(replica="", executor_epoch=0, scheduler_epoch=1), "", 0)
    kept = reports.take()
    assert [each.pull for each in kept if isinstance(each, PullReport)] == list(range(2, MOST + 2))
    assert [each.number for each in kept if isinstance(each, DiskReport)] == list(range(3, MOST + 3))


def test_reports_of_disks_keep_their_numbers() -> None:
    """However often they are said."""
    reports = Reports()
    for _ in range(2):
        reports.note(DiskReport(replica="", executor_epoch=0, scheduler_epoch=1), "", 0)
    for _ in range(2):
        said = [reports.note(each, "", 0) for each in reports.take()]
        assert [each.number for each in said if isinstance(each, DiskReport)] == [1, 2]


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


async def test_reports_of_disks_and_adapters_are_repeated(tmp_path: Path) -> None:
    """Or blocks would stay held, and sequences would wait for their adapter for ever."""
    async with world(settings(make_reference(tmp_path, REFERENCE_CONFIGS[0]))) as running:
        await running.until_state("ready")
        await running.bus.create_group(NAMES.control, "reader")
        common = {"replica": "", "executor_epoch": 0, "scheduler_epoch": 1}
        running.actor._publish(AdapterRead(**common, step=3, digest="some"))
        running.actor._publish(DiskReport(**common, written=("00",)))
        for _ in range(2):
            told = []
            while len(told) < 2:
                told += await running.bus.read_group("reader", "me", [NAMES.control], block_ms=int(1000 * LIMIT_S))
            read, disk = (entry.message for entry in told)
            assert isinstance(read, AdapterRead)
            assert isinstance(disk, DiskReport)
            assert (read.replica, read.step, read.digest) == (NAME, 3, "some")
            assert (disk.replica, disk.number, disk.written) == (NAME, 1, ("00",))
            running.actor.bus_restarted()
