"""Blocks that move, as observers see them: held on both sides, then cached on the second, which is told once."""

from __future__ import annotations

from pagebus.actors.scheduler.events import BlocksPulled
from pagebus.actors.scheduler.service.snapshot import Snapshot
from pagebus.bus.messages import FLASH_PULLED, SchedulerState, StateRequested
from pagebus.web.observatory.board import CACHED, FREE, PINNED, draw_maps
from tests.actors.scheduler.moves.test_pulls import LONG, Pair
from tests.actors.scheduler.world import request

LENDER, TARGET = 0, 1


class Watched(Pair):
    """A pair with an observer. The lender's only slot is taken, so blocks of the next sequence are pulled."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshot = Snapshot(self.world.core)
        self.seen = 0
        self.look()
        self.occupy()
        self.world.send(request("second", LONG, max_tokens=3))

    def look(self) -> SchedulerState:
        """What the observer is told next. Each block is where its pool says it is."""
        asked = StateRequested(ingress="web", serial=1, epoch=self.world.config.epoch, steps_seen=self.seen)
        state = self.snapshot.build(asked, self.world.now_s)
        self.seen = state.steps_seen
        for told, (device, _) in zip(state.replicas, draw_maps(state), strict=True):
            pool = self.world.core.replicas[told.name].pool
            free = [block for block, owner in enumerate(device.owners.tolist()) if owner in (FREE, CACHED)]
            assert len(free) == told.num_free == pool.num_free
        return state

    def arrive(self) -> list[int]:
        """The target's executor pulls. Returns the blocks that the observer hears of."""
        outputs = self.world.send(self.target.pulls.pull_one())
        found = [output for output in outputs if isinstance(output, BlocksPulled)]
        for output in found:
            self.snapshot.pulled(output.replica, output.blocks)
        return [block for output in found for block in output.blocks]


def owners(state: SchedulerState, replica: int) -> list[int]:
    return draw_maps(state)[replica][0].owners.tolist()


def test_both_sides_of_a_pull_are_held_until_it_has_ended() -> None:
    """Then they are cached on both."""
    pair = Watched()
    assert [owners(pair.look(), replica).count(PINNED) for replica in (LENDER, TARGET)] == [9, 9]
    pair.world.step("gpu-1")
    assert [owners(pair.look(), replica).count(PINNED) for replica in (LENDER, TARGET)] == [9, 9]
    blocks = pair.arrive()
    assert len(blocks) == 9
    pair.end()
    state = pair.look()
    assert {owners(state, TARGET)[block] for block in blocks} == {CACHED}
    assert PINNED not in owners(state, LENDER)
    assert [(each.pulled_blocks, each.lent_blocks) for each in state.replicas] == [(0, 9), (9, 0)]


def test_what_was_pulled_flashes_once() -> None:
    """Also if no step follows; who asks anew hears of it too, as long as it is kept."""
    pair = Watched()
    pair.world.step("gpu-1")
    pair.look()
    blocks = pair.arrive()
    state = pair.look()
    assert state.flashed.reshape(-1, 3).tolist() == [[TARGET, FLASH_PULLED, block] for block in blocks]
    assert not len(pair.look().flashed)
    pair.seen = 0
    assert len(pair.look().flashed) == 3 * len(blocks)
    assert not pair.snapshot.is_watched(pair.world.now_s + 60)
    pair.seen = 0
    assert not len(pair.look().flashed), "nobody has looked for a while"


def test_a_pull_that_fails_is_counted_and_shows_nothing() -> None:
    pair = Watched()
    pair.target.pulls.fails = 1
    pair.world.step("gpu-1")
    assert pair.arrive() == []
    assert not len(pair.look().flashed)
    assert pair.counts == (0, 9)
