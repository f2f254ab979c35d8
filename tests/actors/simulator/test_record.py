"""Recording a deployment: the trace and the step log say what happened, and nothing on the bus changes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from pagebus.actors.scheduler.events import ToDetokenizer, ToReplica
from pagebus.actors.simulator.drawing.plots import draw
from pagebus.actors.simulator.fit import read_steps
from pagebus.actors.simulator.recording.record import Follower, Recording, _tables
from pagebus.actors.simulator.recording.recorded import Tables, read_run
from pagebus.actors.simulator.recording.trace import read_trace
from pagebus.bus.contract import Entry, EntryId, LogEntry
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import TokenizedRequest
from pagebus.bus.streams import SCHEDULER_GROUP, Names
from tests.actors.scheduler.drafting_executor import DraftingExecutor
from tests.actors.scheduler.world import World, prompt, request

NAMES = Names("test")


def play(world: World, recording: Recording, *messages: TokenizedRequest, tokenized: bool = True) -> None:
    """Run requests to their ends and tell the recording all that goes over the bus."""
    took = (Entry(NAMES.tokenized, EntryId(0, 1), message) for message in messages)
    if tokenized:
        for entry in took:
            recording.take(entry)
    outputs = world.send(*messages)
    while True:
        for output in outputs:
            if isinstance(output, ToDetokenizer):
                recording.take(Entry(NAMES.sequences("text"), EntryId(1, 1), output.message))
            elif isinstance(output, ToReplica):
                recording.take(Entry(NAMES.steps(output.replica), EntryId(1, output.message.step), output.message))
        executor = world.executors["gpu-0"]
        if not executor.queue:
            return
        seen = len(world.plans)
        started = len(world.heard)
        result = world.step("gpu-0")
        recording.take(Entry(NAMES.results("gpu-0"), EntryId(1, result.step), result))
        new = list(world.heard.values())[started:]
        outputs = [ToDetokenizer("text", heard.started) for heard in new]
        outputs += [ToReplica(*plan) for plan in world.plans[seen:]]


@pytest.mark.parametrize("tokenized", [True, False])
def test_a_recording_can_be_simulated(tmp_path: Path, tokenized: bool) -> None:
    """Lengths, shared blocks and choices of all requests are in the trace, also of those missed in ``tokenized``."""
    path = tmp_path / "run.jsonl"
    world = World()
    world.join()
    with path.open("w") as out:
        recording = Recording(out, NAMES, 0.0, block_size=4)
        head = list(range(12))
        play(
            world,
            recording,
            request("a", head, max_tokens=5),
            request("b", [*head, 7, 8], max_tokens=3),
            tokenized=tokenized,
        )
        play(world, recording, request("c", [9] * 6, max_tokens=4, n=2, stop_token_ids=(2,)), tokenized=tokenized)
        assert recording.finish() == 0
    trace = read_trace(path)
    rows = sorted(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), trace.choices.tolist(), strict=True))
    heard = [len(each.tokens) for each in world.heard.values() if each.started.request_id == "c"]
    assert rows == [(6, max(heard), 2), (12, 5, 1), (14, 3, 1)]
    blocks = {len(trace.blocks[row]): trace.blocks[row] for row in range(3)}
    assert [trace.blocks[row] for row in range(3) if trace.prompt_tokens[row] > 6] == [(0, 1, 2), (0, 1, 2)]
    assert len(blocks[1]) == 1
    assert trace.block_size == 4


def test_a_beam_search_is_a_request_with_choices() -> None:
    """As long as the longest of them; results do not name them."""
    out = io.StringIO()
    recording = Recording(out, NAMES, 0.0, block_size=4)
    world = World()
    world.join()
    stream = NAMES.sequences("text")
    recording.take(
        Entry(NAMES.tokenized, EntryId(0, 1), sent := request("a", [1, 2, 3], n=2, beam_width=2, max_tokens=5))
    )
    world.send(sent)
    world.run()
    for heard in world.heard.values():
        recording.take(Entry(stream, EntryId(1, 1), heard.started))
    (row,) = [json.loads(line) for line in out.getvalue().splitlines() if "prompt_tokens" in json.loads(line)]
    assert (row["prompt_tokens"], row["output_tokens"], row["n"]) == (3, 5, 2)
    assert recording.finish() == 0


def test_the_step_log_says_what_was_computed() -> None:
    """Decode rows with their context, prefill tokens with their pairs; all steps are there."""
    out = io.StringIO()
    recording = Recording(out, NAMES, 0.0, block_size=4)
    world = World(pipeline_depth=1)
    world.join()
    play(world, recording, request("a", [1, 2, 3], max_tokens=3))
    steps = [json.loads(line) for line in out.getvalue().splitlines() if "step" in json.loads(line)]
    names = ("decodes", "decode_context", "prefill_rows", "prefill_tokens", "prefill_pairs")
    work = [tuple(each[name] for name in names) for each in steps]
    assert work[:3] == [(0, 0, 1, 3, 6.0), (1, 4, 0, 0, 0.0), (1, 5, 0, 0, 0.0)]
    assert recording.num_steps == len(world.plans)


def test_drafts_are_tokens_of_decodes() -> None:
    """Also beside a prompt: prefill is what prompts are. No row begins behind the longest that its sequence can be."""
    out = io.StringIO()
    recording = Recording(out, NAMES, 0.0, block_size=4)
    world = World(pipeline_depth=2)
    world.join(DraftingExecutor(depth=2, num_drafts=3, num_blocks=256))
    play(world, recording, request("a", prompt(9), max_tokens=60), request("b", list(range(50, 53)), max_tokens=40))
    steps = [json.loads(line) for line in out.getvalue().splitlines() if "step" in json.loads(line)]
    acceptance = next(iter(world.core.replicas.values())).step_results.acceptance
    assert sum(row["prefill_tokens"] for row in steps) == 9 + 3
    assert sum(row["decodes"] for row in steps) > acceptance.num_draft_tokens > acceptance.num_accepted
    assert max(row["decode_context"] for row in steps) < 9 + 60 + 3 + 40
    assert [row["prefill_pairs"] for row in steps if not row["prefill_rows"]] == [0.0] * (len(steps) - 1)


async def test_reading_leaves_the_bus_as_it_is() -> None:
    """Everything new is read once, from now on, and a consumer group still gets every entry."""
    bus = MemoryBus(MemoryServer(), NAMES)
    await bus.connect()
    await bus.acquire_lease("detokenizer", "text", {}, ttl_s=60)
    await bus.acquire_lease("executor", "gpu-0", {"block_size": 32}, ttl_s=60)
    await bus.create_group(NAMES.tokenized, SCHEDULER_GROUP)
    old, new = request("old", [1]), request("new", [2])
    await bus.publish([(NAMES.tokenized, old)])
    follower = Follower(bus, NAMES)
    assert await follower.read(0) == []
    assert follower.block_size == 32
    await bus.publish([(NAMES.tokenized, new)])
    world = World()
    world.join()
    world.send(new)
    (_, plan), *_ = world.plans
    await bus.append([LogEntry(NAMES.steps("gpu-0"), EntryId(5, 1), plan)])
    read = await follower.read(0)
    assert sorted(type(entry.message).__name__ for entry in read) == ["StepPlan", "TokenizedRequest"]
    assert await follower.read(0) == []
    left = await bus.read_group(SCHEDULER_GROUP, "leader", [NAMES.tokenized], block_ms=0)
    assert [entry.message.request_id for entry in left if isinstance(entry.message, TokenizedRequest)] == ["old", "new"]
    assert [await bus.length(stream) for stream in (NAMES.tokenized, NAMES.steps("gpu-0"))] == [2, 1]
    await bus.close()


def test_steps_of_a_recording_have_device_times(tmp_path: Path) -> None:
    """A step begins when it is launched, or when the step before it is done."""
    path = tmp_path / "run.jsonl"
    step = {"replica": "a", "planned_s": 0, "received_s": 0, "decodes": 1, "decode_context": 5, "prefill_tokens": 0}
    step |= {"prefill_pairs": 0, "swapped_in": 0}
    rows = [
        {**step, "step": number, "launched_s": begun, "done_s": done} for number, begun, done in ((1, 1, 3), (2, 2, 4))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert np.allclose([row["seconds"] for row in read_steps(path)], [2.0, 1.0])


def test_recorded_changes_rebuild_the_block_tables(tmp_path: Path) -> None:
    """With preemptions and shared prefixes: who owns which block follows from the step log."""
    world, tables, seen, returned = World(), Tables(), 0, 0
    world.join(num_blocks=12, max_num_seqs=4, budget=16)
    head = list(range(8))
    world.send(*(request(f"r{i}", [*head, i, i, i][: 8 + i % 4], max_tokens=12) for i in range(8)))
    while any(executor.queue for executor in world.executors.values()):
        for _, plan in world.plans[seen:]:
            tables.apply(_tables(plan))
        seen = len(world.plans)
        running = [each for each in world.core.replicas["gpu-0"].slots.occupied() if each.entered]
        for sequence in running:
            assert tables.slots[sequence.slot] == (sequence.id, sequence.blocks)
        returned = tables.returned
        world.step()
    assert returned > 0
    assert tables.hits > 0


def test_a_recorded_run_is_drawn(tmp_path: Path) -> None:
    """All pictures there is something for, of the recording that the documentation shows."""
    shown = Path(__file__).parents[3] / "docs/measurements/cpu-run.jsonl.gz"
    run, tables = read_run(shown)
    assert tables.returned > 0
    assert len(run.maps) == len(run.times) == len(run.held)
    assert {path.stem for path in draw(run, tmp_path)} == {"batch", "blocks", "sequences", "block-map"}
