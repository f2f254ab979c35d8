"""What an observer is told of the scheduler is what the scheduler holds."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.scheduler.events import ReplicaResult, RequestOver, ToIngress, ToReplica
from pagebus.actors.scheduler.service.snapshot import Snapshot
from pagebus.bus.contract import START
from pagebus.bus.messages import (
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    REQUEST_COLUMNS,
    REQUEST_MARKS,
    SEQUENCE_COLUMNS,
    SEQUENCE_RUNNING,
    STEP_COLUMNS,
    BlockRequested,
    CancelRequest,
    SchedulerState,
    StateRequested,
)
from tests.actors.scheduler.drafting_executor import DraftingExecutor
from tests.actors.scheduler.test_actor import NAMES, PROMPT, Deployment, until
from tests.actors.scheduler.world import World, prompt, request

ASK = StateRequested(ingress="web", serial=1)


def rows(table: Any, columns: tuple[str, ...]) -> list[dict[str, int]]:
    return [dict(zip(columns, row, strict=True)) for row in table.reshape(-1, len(columns)).tolist()]


def tables(state: SchedulerState) -> dict[int, list[int]]:
    """The block table of each sequence."""
    sequences, at, found = rows(state.sequences, SEQUENCE_COLUMNS), 0, {}
    for sequence in sequences:
        found[sequence["id"]] = state.blocks[at : at + sequence["num_blocks"]].tolist()
        at += sequence["num_blocks"]
    assert at == len(state.blocks)
    return found


def check_blocks(world: World, state: SchedulerState) -> None:
    """Each block of the (one) replica is where the pool says it is."""
    (replica,), pool = world.core.replicas.values(), next(iter(world.core.replicas.values())).pool
    owners = [*state.blocks.tolist(), *state.pinned_blocks.tolist()]
    pool.check_integrity(owners)  # each held block, once per owner
    free = set(range(pool.num_blocks)) - set(owners)
    assert len(free) == pool.num_free == state.replicas[0].num_free
    assert set(state.cached_blocks.tolist()) == {block for block in free if block in replica.index}
    assert set(state.cached_hosts.tolist()) == {block for block in replica.host_tier.pool.cached}
    held = {block for block in state.host_blocks.tolist()}
    assert len(held) == replica.host_tier.num_held


@pytest.mark.parametrize("hosts", [0, 40])
def test_blocks_are_where_the_pool_says_in_every_step(hosts: int) -> None:
    """With sharing, preemption and swap: owners, cached and free blocks of both tiers are those of the pools."""
    world = World(preemption_mode="swap" if hosts else "recompute")
    world.join(num_blocks=24, num_host_blocks=hosts)
    snapshot = Snapshot(world.core)
    for i in range(6):
        prompt = [*range(8), *range(i, i + 6 + i)]
        world.send(request(f"r{i}", prompt, max_tokens=16, n=1 + i % 3))
    seen = set()
    while any(executor.queue for executor in world.executors.values()):
        world.step()
        state = snapshot.build(ASK, world.now_s)
        check_blocks(world, state)
        for replica in world.core.replicas.values():
            for sequence in replica.slots.occupied():
                assert tables(state)[sequence.id] == sequence.blocks
        seen |= {name for name in ("pinned_blocks", "cached_blocks", "host_blocks") if len(getattr(state, name))}
    assert world.core.num_preemptions > 0
    assert seen >= ({"cached_blocks", "host_blocks"} if hosts else {"cached_blocks"})


def test_tables_behind_a_window() -> None:
    """What is held is shown, from its place in the sequence on; what was given back is counted."""
    world = World(window=6)
    world.join(window=6, budget=8)
    snapshot = Snapshot(world.core)
    world.send(request("a", list(range(30)), max_tokens=20))
    for _ in range(10):
        world.step()
    replica = world.core.replicas["gpu-0"]
    (sequence,) = replica.slots.occupied()
    state = snapshot.build(ASK, world.now_s)
    check_blocks(world, state)
    assert sequence.first_block > 0
    assert tables(state)[sequence.id] == sequence.blocks
    assert state.replicas[0].given_back_blocks == replica.counts.num_given_back == sequence.first_block
    told = snapshot.block(BlockRequested(ingress="web", serial=1, replica="gpu-0", block=sequence.blocks[0]))
    assert (told.first_block, told.place, told.table.tolist()) == (sequence.first_block, 0, sequence.blocks)
    assert len(told.hashes) == sequence.first_block + 1


def drive(world: World, snapshot: Snapshot, requests: list[Any]) -> list[SchedulerState]:
    """Run requests to their end as the actor does, and look after each step."""
    states = [snapshot.build(ASK, world.now_s)]

    def show(outputs: list[Any]) -> None:
        for output in outputs:
            if isinstance(output, ToReplica):
                snapshot.planned(output.replica, output.message)
            elif isinstance(output, RequestOver):
                snapshot.over(output.request, world.now_s)

    show(world.send(*requests))
    while any(executor.queue for executor in world.executors.values()):
        name = next(name for name, executor in world.executors.items() if executor.queue)
        result = world.executors[name].run_one()
        stops = world._listen(result)
        snapshot.result_arrived(name, result, world.now_s)
        show(world.send(ReplicaResult(name, result), *stops))
        last = states[-1]
        asked = StateRequested(ingress="web", serial=2, epoch=1, steps_seen=last.steps_seen, over_seen=last.over_seen)
        states.append(snapshot.build(asked, world.now_s))
    return states


def test_every_step_is_told_once_with_its_tokens() -> None:
    """Prefill and decode tokens of all plans; tokens sampled for sequences that had ended are wasted."""
    world = World(eos_token_ids=tuple(range(0, 40, 3)))
    executor = world.join()
    states = drive(world, Snapshot(world.core), [request("a", list(range(9)), max_tokens=30)])
    steps = [row for state in states for row in rows(state.steps, STEP_COLUMNS)]
    plans = [plan for plan in executor.plans if plan.step <= steps[-1]["step"]]
    assert [row["step"] for row in steps] == [plan.step for plan in plans]
    assert [row["decodes"] for row in steps] == [plan.num_decodes for plan in plans]
    assert sum(row["prefill"] for row in steps) == 9
    (heard,) = world.heard.values()
    assert sum(row["decodes"] - row["wasted"] for row in steps) == len(heard.tokens) - 1


def test_a_request_that_is_over_is_told_once() -> None:
    """With its counts, and the times of what has happened to it in order."""
    world = World()
    world.join()
    states = drive(world, Snapshot(world.core), [request("a", list(range(9)), max_tokens=5)])
    over = [state for state in states if state.num_over]
    assert [state.request_ids for state in over] == [("a",)]
    (row,) = rows(over[0].requests, REQUEST_COLUMNS)
    assert (row["num_prompt"], row["num_output"], row["outcome"]) == (9, 5, OUTCOME_DONE)
    ages = dict(zip(REQUEST_MARKS, over[0].request_marks.view("<f4").tolist(), strict=True))
    assert ages["started"] >= ages["over"] == 0


def test_drafts_of_each_request_are_told() -> None:
    """While it runs and when it is over: together they are those of the replica, and none of one that has none."""
    world = World(pipeline_depth=2)
    executor = DraftingExecutor(depth=2, num_drafts=3, num_blocks=256)
    world.join(executor)
    (replica,) = world.core.replicas.values()
    wanted = [request("a", prompt(9), max_tokens=60, n=2), request("b", prompt(5), max_tokens=40)]
    wanted.append(request("c", prompt(7), max_tokens=40, num_speculative_tokens=0))
    over, running = {}, []
    for state in drive(world, Snapshot(world.core), wanted):
        told = dict(zip(state.request_ids, rows(state.requests, REQUEST_COLUMNS), strict=True))
        running += [row["num_drafted"] for row in list(told.values())[state.num_over :]]
        over |= dict(list(told.items())[: state.num_over])
    assert max(running) > 0
    assert over["a"]["num_accepted"] > over["b"]["num_accepted"] > 0 == over["c"]["num_drafted"]
    assert all(row["num_drafted"] >= row["num_accepted"] for row in over.values())
    assert sum(row["num_drafted"] for row in over.values()) == replica.step_results.acceptance.num_draft_tokens
    assert sum(row["num_accepted"] for row in over.values()) == replica.step_results.acceptance.num_accepted


def test_drafts_are_tokens_of_decodes() -> None:
    """Also beside a prompt: prefill is what prompts are, and nothing else."""
    world = World(pipeline_depth=2)
    executor = DraftingExecutor(depth=2, num_drafts=3, num_blocks=256)
    world.join(executor)
    wanted = [request("a", prompt(9), max_tokens=60), request("b", list(range(50, 55)), max_tokens=40)]
    states = drive(world, Snapshot(world.core), wanted)
    steps = [row for state in states for row in rows(state.steps, STEP_COLUMNS)]
    (replica,) = world.core.replicas.values()
    assert sum(row["prefill"] for row in steps) == 9 + 5
    assert sum(row["decodes"] for row in steps) > replica.step_results.acceptance.num_draft_tokens > 0


def test_nothing_is_kept_when_nobody_has_asked_for_a_while() -> None:
    """Whoever looks away is forgotten."""
    world = World()
    snapshot = Snapshot(world.core)
    snapshot.build(ASK, 100.0)
    assert snapshot.is_watched(104.0)
    assert not snapshot.is_watched(105.0)


def test_a_block_tells_its_owners_and_the_chain_of_contents() -> None:
    """Two requests share the first block of a prompt; a free block tells what can be found in it."""
    world = World()
    world.join()
    world.send(request("a", list(range(9)), max_tokens=20))
    for _ in range(3):
        world.step()
    world.send(request("b", list(range(9)), max_tokens=20))
    world.step()
    (replica,) = world.core.replicas.values()
    first = replica.slots.occupied()[0]
    told = Snapshot(world.core).block(
        BlockRequested(ingress="web", serial=7, replica=replica.name, block=first.blocks[1])
    )
    assert (told.serial, told.owners, told.place) == (7, ("a", "b"), 1)
    assert told.table.tolist() == first.blocks
    assert told.hashes == tuple(each.hex() for each in first.hashes[:2])
    world.run()
    found = Snapshot(world.core).block(
        BlockRequested(ingress="web", serial=8, replica=replica.name, block=told.table.tolist()[0])
    )
    assert (found.owners, found.hashes) == ((), told.hashes[:1])


def test_a_cancelled_request_is_told_to_its_client_and_frees_everything() -> None:
    """Its client gets a 409; slots and blocks are free; a request that is not there is left in peace."""
    world = World()
    world.join()
    world.send(request("a", list(range(9)), max_tokens=20))
    world.step()
    outputs = world.send(CancelRequest(request_id="a"), CancelRequest(request_id="b"))
    failed = [output.message for output in outputs if isinstance(output, ToIngress)]
    assert [(each.request_id, each.status) for each in failed] == [("a", 409)]
    assert [output.request.aborted for output in outputs if isinstance(output, RequestOver)] == [True]
    (replica,) = world.core.replicas.values()
    assert replica.pool.num_free == replica.pool.num_blocks


async def test_the_scheduler_answers_on_the_mailbox_of_who_asks() -> None:
    """Over the bus, at a paused step: its state, and the blocks of what runs."""
    deployment = Deployment()
    async with deployment.running():
        await deployment.bus.open_mailbox(NAMES.replies("web@1"), ttl_s=60)
        await deployment.add_executor()
        await until(lambda: bool(deployment.scheduler.core.replicas))
        deployment.pause_after = 3
        await deployment.bus.publish([(NAMES.tokenized, request("a", PROMPT * 4, block_size=16, max_tokens=40))])
        await until(lambda: len(deployment.results) == 3)
        (replica,) = deployment.scheduler.core.replicas.values()
        await until(lambda: len(replica.in_flight) >= 2)
        await deployment.bus.publish([(NAMES.control, StateRequested(ingress="web@1", serial=5))])
        state = await _reply(deployment)
        assert state.serial == 5
        (sequence,) = replica.slots.occupied()
        assert tables(state) == {sequence.id: sequence.blocks}
        (row,) = rows(state.sequences, SEQUENCE_COLUMNS)
        assert (row["state"], row["num_tokens"]) == (SEQUENCE_RUNNING, replica.slots.known[sequence.slot])
        await deployment.bus.publish([(NAMES.control, CancelRequest(request_id="a"))])
        await until(lambda: not deployment.scheduler.core.requests)
        await deployment.bus.publish([(NAMES.control, StateRequested(ingress="web@1", serial=6))])
        after = await _reply(deployment, skip=1)
        assert after.replicas[0].num_free == replica.pool.num_blocks
        assert rows(after.requests, REQUEST_COLUMNS)[0]["outcome"] == OUTCOME_ABORTED
        deployment.pause_after = None


async def _reply(deployment: Deployment, skip: int = 0) -> SchedulerState:
    found: list[SchedulerState] = []
    while len(found) <= skip:
        entries = await deployment.bus.read({NAMES.replies("web@1"): START}, block_ms=50)
        found = [entry.message for entry in entries if isinstance(entry.message, SchedulerState)]
    return found[skip]
