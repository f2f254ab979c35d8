"""Prefixes of hundreds of blocks: they are handled many blocks at a time."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

import pytest

from pagebus.actors.model.block_hash import hash_blocks
from pagebus.actors.scheduler.events import ToReplica
from tests.actors.scheduler.moves.test_pulls import Pair
from tests.actors.scheduler.world import prompt, request

PREFIX = prompt(1200, seed=6)
HASHES = hash_blocks(PREFIX, 4)[:-1]
"""One token is always computed."""
OPTIONS = {"num_blocks": 700, "max_model_len": 1300}


def list_some(pair: Pair, places: Collection[int]) -> list[int]:
    """Let the target have these blocks of the prefix, too."""
    lender, target = (pair.world.core.replicas[name] for name in ("gpu-0", "gpu-1"))
    blocks = target.pool.allocate(len(places))
    caches = [pair.lenders[each.pulls.address][0] for each in (pair.lender, pair.target)]
    caches[1][blocks] = caches[0][[lender.index.blocks[HASHES[place]] for place in places]]
    target.index.insert_new([HASHES[place] for place in places], blocks)
    target.index.new_anchors += HASHES[:1] if 0 in places else []
    target.pool.release(reversed(blocks))
    return blocks


@pytest.mark.parametrize("places", [(), (133,), (65, 201), range(60, 90), range(100), range(200, 299)])
def test_what_the_target_has_in_the_midst_stays_where_it_is(places: Collection[int]) -> None:
    """Single blocks may be pulled in vain. All are found in the end, and the answers are right."""
    pair = Pair(**OPTIONS)
    pair.world.send(request("long", PREFIX, max_tokens=2))
    pair.world.run()
    blocks = list_some(pair, places)
    pair.occupy()
    pair.world.send(request("second", PREFIX, max_tokens=3))
    assert len(pair.world.core.planner.pulls) == 1
    pair.end()
    pulled, failed = pair.counts
    assert failed == 0
    assert 0 <= pulled - (len(HASHES) - len(places)) <= (len(places) if len(places) < 16 else 0)
    target = pair.world.core.replicas["gpu-1"].index
    found = target.match(HASHES, len(HASHES))
    assert found == [target.blocks[content] for content in HASHES]
    assert [found[place] for place in places] == blocks


def test_the_plan_waits_for_nothing_that_may_come_later() -> None:
    """The lender's blocks are given back, and all is listed, behind the plan with the sequence."""
    pair = Pair(**{**OPTIONS, "num_blocks": 2000})
    core = pair.world.core
    pair.world.send(request("long", PREFIX, max_tokens=2))
    pair.world.run()
    pair.occupy()
    pair.world.send(request("second", PREFIX, max_tokens=3))
    pair.world.step("gpu-1")
    core.handle(pair.target.pulls.pull_one())
    parts = core.plan_in_turns(0.0)
    first = list(next(parts))
    assert [each.message.num_scheduled.tolist() for each in first if isinstance(each, ToReplica)] == [[4]]
    assert core.planner.pulls.lent(core.replicas["gpu-0"])
    for output in chain(first, *parts):
        pair.world._receive(output)
    assert not core.planner.pulls.lent(core.replicas["gpu-0"])
    core.check_integrity()
    pair.end()
    assert pair.counts == (len(HASHES), 0)


def test_others_wait_for_what_is_on_its_way() -> None:
    """Two ask for a prefix, and one for its first half, while it is pulled: there is one pull."""
    pair = Pair(**OPTIONS)
    pair.world.send(request("long", PREFIX, max_tokens=2))
    pair.world.run()
    pair.occupy()
    for name, length in (("second", 1200), ("third", 1200), ("half", 600)):
        pair.world.send(request(name, PREFIX[:length], max_tokens=3))
    assert len(pair.world.core.planner.pulls) == 1
    pair.end()
    assert pair.counts == (len(HASHES), 0)
