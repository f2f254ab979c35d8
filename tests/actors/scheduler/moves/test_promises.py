"""Pulls that are promised before their blocks are there: plans may use these, and nobody gets what is still read."""

from __future__ import annotations

from msgspec.structs import replace

from pagebus.actors.model.block_hash import hash_blocks
from tests.actors.scheduler.moves.test_pulls import LONG, Pair
from tests.actors.scheduler.world import prompt, request

HASHES = hash_blocks(LONG, 4)


def promised(**options: object) -> Pair:
    """The second prompt's pull has been promised, and is not over."""
    pair = Pair(**options)
    pair.target.pulls.promises = 1
    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    pair.world.step("gpu-1")
    pair.world.pull("gpu-1")
    assert [order.promised > 0 for order in pair.target.pulls.orders] == [True]
    return pair


def test_a_plan_uses_what_is_promised() -> None:
    """The sequence runs while its blocks are still copied. Both sides hold them until they are there."""
    pair = promised()
    replicas, pulls = pair.world.core.replicas, pair.world.core.planner.pulls
    assert pair.running("gpu-1") == ["second"]
    assert pulls.lent(replicas["gpu-0"])
    assert pair.counts == (9, 0)
    pair.world.core.check_integrity()
    while pair.target.queue:
        pair.world.step("gpu-1")
    assert "second" in pair.world.over
    assert pulls.lent(replicas["gpu-0"])
    pair.world.pull("gpu-1")
    assert not pulls.lent(replicas["gpu-0"])
    assert pulls.link(replicas["gpu-0"], replicas["gpu-1"]).bytes_per_s == 1e6
    pair.end()
    assert pair.counts == (9, 0)


def test_what_is_still_read_is_not_given_away() -> None:
    """Those that want all of the lender's blocks wait until the pull is over."""
    pair = promised(num_blocks=24, max_num_seqs=2)
    lender, sources = pair.world.core.replicas["gpu-0"], pair.target.pulls.orders[0].sources
    for number in range(3):
        pair.world.send(request(f"hog {number}", prompt(60, seed=number), max_tokens=30))
    for _ in range(30):
        if pair.lender.queue:
            pair.world.step("gpu-0")
    assert lender.index.hashes_of(sources) == HASHES[:9]
    while pair.target.queue and "second" not in pair.world.over:
        pair.world.step("gpu-1")
    pair.end()


def test_others_pull_it_only_behind_a_plan_that_found_it_there() -> None:
    """The next plan of the target is the first one that waits for the copy."""
    pair = promised()
    target = pair.world.core.replicas["gpu-1"]
    blocks = pair.target.pulls.orders[0].blocks
    step = target.index.newest_step(blocks)
    assert not target.has_landed(step)
    assert [plan.new_sequences[0].num_computed_tokens for plan in pair.target.queue if plan.step == step] == [36]
    while not target.has_landed(step):
        pair.world.step("gpu-1")
    pair.end()


def test_saying_it_again_changes_nothing() -> None:
    """Before it is over, and afterwards."""
    pair = promised()
    order = pair.target.pulls.orders[0]
    again = pair.target.pulls._report(order, there=True, promised=True)
    pair.world.send(again)
    assert pair.counts == (9, 0)
    pair.world.pull("gpu-1")
    pair.world.send(again)
    assert pair.counts == (9, 0)
    pair.end()


def test_a_promise_that_is_not_kept_is_not_found_again() -> None:
    """The executor ends then; what it has computed with the blocks is computed elsewhere."""
    pair = promised()
    order = pair.target.pulls.orders.popleft()
    report = pair.target.pulls._report(order, there=False)
    pair.world.send(replace(report, error="the lender was gone"))
    target = pair.world.core.replicas["gpu-1"]
    assert target.index.match(HASHES, 9) == []
    assert pair.counts == (9, 9)
    pair.target.queue.clear()
    pair.world.kill("gpu-1")
    pair.end()
    assert "second" in pair.world.over
