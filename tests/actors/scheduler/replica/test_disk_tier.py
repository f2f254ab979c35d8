"""The disk tier: what is written and read, who waits for it, and what a bad disk costs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pagebus.actors.model.block_hash import hash_blocks
from pagebus.actors.scheduler.events import CachesReset
from pagebus.actors.scheduler.replica.disk.disk_tier import PATIENCE_S, DiskTier
from pagebus.bus.messages import DiskReport
from tests.actors.scheduler.fake_disk import FakeDisk
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.world import World, prompt, request

LONG = prompt(40, seed=5)


def stored(**options: Any) -> tuple[World, FakeExecutor]:
    """A world whose executor has a disk."""
    world = World()
    sizes = {"num_blocks": 16, "num_host_blocks": 40, "copy_tokens": 0.1}
    return world, world.join(**{**sizes, "disk": FakeDisk(100), **options})


def restarted(world: World, executor: FakeExecutor, **options: Any) -> tuple[World, FakeExecutor]:
    """Everything anew but the disk."""
    again, new = stored(disk=executor.disk, **options)
    again.run()
    return again, new


def tier(world: World) -> DiskTier:
    return world.core.replicas["gpu-0"].disk_tier


def ask(world: World, name: str, tokens: list[int] = LONG) -> None:
    world.send(request(name, tokens, max_tokens=3))
    world.run()
    world.check_end()


@pytest.mark.parametrize("sizes", [{}, {"windowed_pages": 2, "windowed_tokens": 6, "num_blocks": 60}])
def test_a_prompt_outlives_a_restart(sizes: dict[str, Any]) -> None:
    """Its blocks are written without any want of room; then all but the last one is read, and the rest computed."""
    world, executor = stored(**sizes)
    ask(world, "a")
    assert len(executor.disk.stored) == tier(world).num_out == 10 * (1 + sizes.get("windowed_pages", 0))

    world, executor = restarted(world, executor, **sizes)
    ask(world, "b")

    assert executor.num_computed == 40 - 36 + 2
    assert tier(world).num_in >= 9
    assert tier(world).num_hits > 0


def test_only_those_who_want_it_wait_for_the_disk() -> None:
    """A request beside it runs and ends while the disk has not answered."""
    world, executor = stored()
    ask(world, "a")
    world, executor = restarted(world, executor)
    world.send(request("b", LONG, max_tokens=3), request("c", prompt(12), max_tokens=3))
    while executor.queue:
        world.step()

    assert "c" in world.over
    assert "b" not in world.over
    assert executor.disk.orders
    world.run()
    world.check_end()
    assert executor.num_computed == (12 + 2) + (40 - 36 + 2)


def test_two_who_want_the_same_blocks_have_them_read_once() -> None:
    """Both wait for the one read."""
    world, executor = stored()
    ask(world, "a")
    world, executor = restarted(world, executor)
    world.send(request("b", LONG, max_tokens=3), request("c", [*LONG, 1, 2, 3, 4, 5], max_tokens=3))
    while executor.queue:
        world.step()
    assert not world.over
    world.run()
    world.check_end()
    assert tier(world).num_in == 10
    assert executor.num_computed == (40 - 36 + 2) + (45 - 40 + 2)


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_what_cannot_be_read_is_computed(fails: int) -> None:
    """Once: a sequence does not try the disk again. What has failed is not there any more."""
    world, executor = stored()
    ask(world, "a")
    world, executor = restarted(world, executor)
    executor.disk.fails, executor.disk.num_orders = fails, 0
    ask(world, "b")

    assert tier(world).num_not_read >= 9 // fails
    assert executor.num_computed > 40 - 36 + 2


def test_a_disk_that_is_full_keeps_the_size_that_it_has() -> None:
    """After a failed write others are overwritten, and nothing grows."""
    world, executor = stored(num_blocks=30)
    ask(world, "a")
    executor.disk.fails, executor.disk.num_orders = 2, 0
    for number in range(6):
        ask(world, f"r{number}", prompt(36, seed=number + 20))

    assert tier(world).num_not_written > 0
    assert tier(world).pool.num_blocks < 100
    assert len(executor.disk.stored) <= tier(world).pool.num_blocks


def test_the_one_used_longest_ago_makes_room() -> None:
    """A prompt that is asked for after every restart stays, and others go."""
    world, executor = stored(disk=FakeDisk(24))
    ask(world, "a")
    for number in range(4):
        world, executor = restarted(world, executor)
        ask(world, "a")
        computed = executor.num_computed
        assert computed == 40 - 36 + 2
        ask(world, f"r{number}", prompt(40, seed=number + 30))
    assert len(executor.disk.stored) <= 24


def test_a_slow_disk_is_not_read_for_long() -> None:
    """The first read tells the rate; later ones do not pay, until a try costs little beside what was computed."""
    world, executor = stored()
    ask(world, "a")
    ask(world, "other", prompt(40, seed=9))
    world, executor = restarted(world, executor)
    tier(world).rate.bytes_per_s = 10.0
    ask(world, "b")
    assert executor.num_computed == 40 + 2
    assert tier(world).rate.bytes_per_s == 10.0
    assert tier(world).rate.pays(cost_tokens=1.0, num_tokens=0)


def until_ordered(world: World, executor: FakeExecutor, column: str) -> None:
    """Until the oldest order that the disk has not obeyed has these."""
    while not (executor.disk.orders and getattr(executor.disk.orders[0][0], column)):
        if executor.queue:
            world.step()
        else:
            world.obey(executor.name)


def test_resetting_the_caches_empties_the_disk() -> None:
    """Also of what is being written at that moment."""
    world, executor = stored()
    ask(world, "a")
    world.send(request("b", prompt(40, seed=6), max_tokens=3))
    until_ordered(world, executor, "disk_writes")
    world.send(CachesReset(host=True))
    world.run()
    world.check_end()
    assert tier(world).num_out > 10
    assert not executor.disk.stored


def test_what_is_ordered_with_a_reset_is_deleted_once_it_is_written() -> None:
    """The plan's command comes before its writes, of which the scheduler learns later."""
    world, executor = stored()
    ask(world, "a")
    replica = world.core.replicas["gpu-0"]
    content = hash_blocks(LONG, 4)[9]
    tier(world).pool.forget(content)
    tier(world).offer([content], [replica.index.find(content)])
    tier(world).finish_plan()
    world.send(CachesReset(host=True))
    assert executor.plans[-1].disk_writes == (content.hex(),)
    world.run()
    world.check_end()
    assert not executor.disk.stored


def test_what_was_being_read_as_the_caches_were_reset_is_not_used() -> None:
    """It may be of other weights: the sequence that waits for it is computed from its first token."""
    world, executor = stored()
    ask(world, "a")
    world, executor = restarted(world, executor)
    world.send(request("b", LONG, max_tokens=3))
    until_ordered(world, executor, "disk_reads")
    world.send(CachesReset(host=True))
    world.run()
    world.check_end()
    assert tier(world).num_in > 0
    assert executor.num_computed == 40 + 2
    assert len(executor.disk.stored) == 10


def test_a_report_of_another_life_is_ignored() -> None:
    """Of an earlier scheduler, or about an earlier executor."""
    world, executor = stored()
    world.run()
    told = DiskReport(replica="gpu-0", executor_epoch=executor.epoch, scheduler_epoch=1, found=("00" * 16,))
    world.send(replace(told, executor_epoch=1), replace(told, scheduler_epoch=0))
    assert not tier(world).pool.stored
    world.send(told)
    assert len(tier(world).pool.stored) == 1


def test_a_report_that_is_repeated_counts_once() -> None:
    """What it says was read before may be read anew, into a block that does not hold it yet."""
    world, executor = stored()
    ask(world, "a")
    world, executor = restarted(world, executor)
    world.send(request("b", LONG, max_tokens=3))
    while not executor.disk.orders:
        world.step()
    first = executor.disk.obey_one()
    assert first.read
    world.send(first)
    assert tier(world).num_in == len(first.read)
    content = bytes.fromhex(first.read[0])
    (host,) = tier(world)._host.pool.allocate(1)
    tier(world)._reads[content] = host
    world.send(first)
    assert tier(world)._reads == {content: host}
    world.send(replace(first, number=first.number + 1))
    assert not tier(world)._reads
    world.run()
    world.check_end()


def test_a_report_that_was_lost_and_is_repeated_late_counts() -> None:
    """Behind one that was written after it."""
    world, executor = stored()
    ask(world, "a")
    world, executor = restarted(world, executor)
    world.send(request("b", LONG, max_tokens=3))
    while not executor.disk.orders:
        world.step()
    lost = executor.disk.obey_one()
    world.send(replace(lost, number=lost.number + 1, read=(), not_read=(), found=()))
    assert tier(world).is_awaited
    world.send(lost)
    assert not tier(world).is_awaited
    world.run()
    world.check_end()
    assert executor.num_computed == 40 - 36 + 2


def test_nothing_is_written_before_it_is_known_what_is_there() -> None:
    """So a full disk never has more than it may, however late it answers."""
    world, executor = stored(disk=FakeDisk(10))
    ask(world, "a")
    before = set(executor.disk.stored)
    assert len(before) == 10

    world, executor = stored(disk=executor.disk)
    world.send(request("b", prompt(40, seed=6), max_tokens=12))
    while executor.queue:
        world.step()
    assert set(executor.disk.stored) == before
    assert not any(plan.disk_writes for plan in executor.plans)

    world.run()
    world.check_end()
    assert len(executor.disk.stored) == 10 == len(before - set(executor.disk.stored))


def test_what_is_beyond_the_size_is_deleted() -> None:
    """The disk has had more blocks than it may have now."""
    world, executor = stored()
    ask(world, "a")
    assert len(executor.disk.stored) == 10
    executor.disk.num_blocks = 12
    world, executor = stored(disk=executor.disk)
    tier(world).pool.num_blocks = 6
    world.run()
    assert len(executor.disk.stored) == 6
    assert executor.disk.stored.keys() == {content.hex() for content in tier(world).pool.stored}


def test_nobody_waits_for_a_disk_that_hangs() -> None:
    """After a while what it was to read is computed, and nothing more is asked of it until it answers."""
    world, executor = stored()
    ask(world, "a")
    world, executor = restarted(world, executor)
    world.send(request("b", LONG, max_tokens=3))
    while executor.queue:
        world.step()
    world.now_s += PATIENCE_S - 1
    world.send()
    assert not executor.queue, "it may be slow"
    world.now_s += PATIENCE_S - 1
    world.send()
    assert tier(world).owned, "it may still write there"
    assert [note.event for note in world.notes].count("a disk does not answer") == 1
    while executor.queue:
        world.step()
    assert "b" in world.over
    assert executor.num_computed == 40 + 2

    world.send(CachesReset(), request("c", LONG, max_tokens=3))
    while executor.queue:
        world.step()
    assert "c" in world.over

    world.run()
    world.check_end()
    assert tier(world).num_in >= 9
    replica = world.core.replicas["gpu-0"]
    replica.index.clear()
    replica.host_tier.pool.forget_cached()
    world.send(request("d", LONG, max_tokens=3))
    assert executor.plans[-1].disk_reads, "it is asked again"
    world.run()
    world.check_end()
