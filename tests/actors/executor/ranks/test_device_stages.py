"""How stages on GPUs pass steps on, where memory of the host stands in for a GPU's, and a thread for its work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.graphs.graphs import empty_step
from pagebus.actors.executor.models.network import Network
from pagebus.actors.executor.models.passage import Passage
from pagebus.actors.executor.ranks.device_stage_steps import DeviceStageSteps
from pagebus.actors.executor.ranks.gloo import GlooComm
from pagebus.actors.executor.ranks.ring import Ring
from pagebus.actors.executor.ranks.stage_steps import Departure
from pagebus.actors.executor.ranks.staged_comm import StagedComm
from pagebus.actors.model.shards.stage import Stage
from pagebus.bus.messages import Int32Array, StepPlan
from tests.actors.executor.eager_graphs import EagerGraphs, pad_steps
from tests.actors.executor.ranks.test_ranks import SAMPLED, SMALL, answers
from tests.helpers.engine_driver import Driver, ints
from tests.helpers.model_factory import make_model
from tests.helpers.ranks.rank_driver import LOOPBACK
from tests.helpers.ranks.stage_driver import GENERATION, StageDriver
from tests.helpers.waiting import LIMIT_S

HIDDEN, MOST = 3, 8
MOST_TOKENS = 128


class Late(DeviceStageSteps):
    """Sends as the thread does that waits for a GPU: later than the step's launch, but in order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._passage.reserve(MOST_TOKENS, self._model.config.hidden_size, torch.float32, torch.device("cpu"))
        self.launched: queue.SimpleQueue[tuple[Departure, Int32Array] | None] = queue.SimpleQueue()
        threading.Thread(target=self._complete, daemon=True).start()

    def _complete(self) -> None:
        while (launched := self.launched.get()) is not None:
            departure, tokens = launched
            departure(tokens)

    def end(self, step: int, work: StepWork, sampled: torch.Tensor | None) -> None:
        departure = super().end(step, work, sampled)
        assert departure is not None
        tokens = np.empty(0, np.int32) if sampled is None else sampled.numpy()[: work.num_results].copy()
        self.launched.put((departure, tokens))


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[StageDriver]:
    """Three stages whose passes begin at one place, as from graphs: padded, with garbage behind a step's tokens."""
    folder = make_model(tmp_path, "qwen3", seed=6, num_hidden_layers=4)
    with pytest.MonkeyPatch.context() as patch:
        driver = StageDriver(folder, 3, **SMALL)
        for engine in driver.engines:
            runner, buckets, comm = engine._loaded.runner, Buckets(8, 64, 4), engine._comm
            assert isinstance(comm, StagedComm)
            engine._stage = Late(comm.ring, runner.model.passage, runner.model, runner.state)
            pad_steps(runner, patch, buckets, EagerGraphs(buckets, runner))
        yield driver
        driver.close()
        for engine in driver.engines:
            assert isinstance(engine._stage, Late)
            engine._stage.launched.put(None)


def test_padded_stages_give_the_tokens_of_one_rank(driver: StageDriver, tmp_path: Path) -> None:
    prompts = [[1], list(range(2, 90)), list(range(40))]
    one = Driver(tmp_path, **SMALL | {"spec_method": "none"})
    for params in SAMPLED:
        assert answers(driver, prompts, **params) == answers(one, prompts, **params)
    one.close()
    for engine in driver.engines:
        graphs = engine._loaded.runner.graphs
        assert isinstance(graphs, EagerGraphs)
        assert {bucket.spans > 0 for bucket in graphs.replayed} == {False, True}


def test_a_lost_stage_is_named(driver: StageDriver) -> None:
    assert driver.engines[2].stop()
    scheduler = driver.scheduler(64)
    scheduler.add(list(range(20)), 8)
    plan = scheduler.plan()
    assert plan is not None
    for engine in driver.engines[:2]:
        engine.submit(plan, 1)
    with pytest.raises(EngineError, match="has lost rank"):
        driver.result()


def meet(ranks: int) -> list[Ring]:
    """Connected: messages go from each to the next one's, and from the last to the first."""
    store = dist.HashStore()
    rings = [Ring(rank, (rank - 1) % ranks, (rank + 1) % ranks, LOOPBACK, GENERATION, LIMIT_S) for rank in range(ranks)]

    def connect(rank: int) -> None:
        comm = GlooComm(rank, ranks, lambda: store, LOOPBACK, LIMIT_S)
        comm.connect()
        rings[rank].connect(comm)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return rings


class Tokens:
    """In place of the tokens of all slots."""

    def __init__(self) -> None:
        self.stored: list[list[list[int]]] = []

    def store_sampled(self, *columns: torch.Tensor) -> None:
        self.stored.append([column.tolist() for column in columns])


@pytest.fixture
def two() -> Iterator[tuple[DeviceStageSteps, DeviceStageSteps, Tokens]]:
    """The first stage and the last, and what the first has stored."""
    rings, tokens = meet(2), Tokens()
    steps = []
    for index, ring in enumerate(rings):
        passage = Passage(Stage(index, 2, range(index, index + 1), tied=False))
        passage.reserve(MOST, HIDDEN, torch.float32, torch.device("cpu"))
        model = SimpleNamespace(
            parameters=SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32), passage=passage,
            config=SimpleNamespace(hidden_size=HIDDEN),
        )  # fmt: skip
        steps.append(DeviceStageSteps(ring, passage, cast("Network", model), cast("DeviceBatch", tokens)))
    tokens.stored.clear()  # nowhere, before the first step
    yield steps[0], steps[1], tokens
    for ring in rings:
        ring.close()


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, planned_s=0.0, num_decodes=0, slots=ints([]), num_scheduled=ints([]))


def work(slots: list[int], position: int) -> StepWork:
    """One token of each slot, behind which one is sampled."""
    found, count = empty_step(), len(slots)
    found.slots = found.sample_slots = ints(slots)
    found.num_tokens, found.positions = count, np.full(count, position, np.int32)
    return found


def leave(steps: DeviceStageSteps, values: float, count: int) -> None:
    steps._passage.leaving = torch.full((count, HIDDEN), float(values))


Two = tuple[DeviceStageSteps, DeviceStageSteps, Tokens]


def test_a_step_is_sent_once_it_is_computed(two: Two) -> None:
    """Two steps are launched before the first of them is computed; the second stage gets both, in order."""
    first, last, tokens = two
    lanes, departures = [work([0, 1], 5), work([2], 7)], []
    for step, each in enumerate(lanes, 1):
        first.begin(plan(step), 1, each)
        leave(first, step, len(each.slots))
        departures.append(first.end(step, each, None))
    assert not last._ring.has_message
    for departure in departures:
        assert departure is not None
        departure(ints([]))
    for step, each in enumerate(lanes, 1):
        last.begin(plan(step), 1, each)
        assert last._passage.enter(MOST, HIDDEN, torch.float32, torch.device("cpu"))[: len(each.slots)].eq(step).all()
        departure = last.end(step, each, None)
        assert departure is not None
        departure(ints([10 * step + place for place in range(len(each.slots))]))
    first.begin(plan(3), 1, work([1, 2], 8))
    assert tokens.stored == [[[0, 1], [5, 5], [10, 11]], [[2], [7], [20]]]


def test_a_stage_does_not_write_to_what_enters(two: Two) -> None:
    """A pass that is replayed begins with what has entered, whatever the one before has done to it."""
    _, last, _ = two
    last._passage.bring(torch.ones(2, HIDDEN))
    for _ in range(2):
        stream = last._passage.enter(4, HIDDEN, torch.float32, torch.device("cpu"))
        assert stream.tolist() == [[1.0] * HIDDEN] * 2 + [[0.0] * HIDDEN] * 2
        stream += 5


def test_steps_without_rows_pass_too(two: Two) -> None:
    first, last, tokens = two
    nothing = work([], 0)
    for steps in (first, last):
        steps.begin(plan(1), 1, nothing)
        departure = steps.end(1, nothing, None)
        assert departure is not None
        departure(ints([]))
    first.begin(plan(2), 1, work([0], 3))
    assert tokens.stored == []


def test_tokens_of_a_lost_scheduler_are_not_stored(two: Two) -> None:
    """Its steps still pass, but another sequence may have the slot."""
    first, last, tokens = two
    old = work([0], 5)
    for steps in (first, last):
        steps.begin(plan(1), 1, old)
        if steps is first:
            leave(first, 1.0, 1)
        departure = steps.end(1, old, None)
        assert departure is not None
        departure(ints([42]))
    first.begin(plan(9), 2, work([0], 0))
    assert tokens.stored == []


def test_tokens_of_a_sequence_that_is_gone_come_before_the_next_one_in_its_slot(two: Two) -> None:
    """The step that enters it waits for them, and stores them first."""
    first, last, tokens = two
    old, following = work([0], 5), work([], 0)
    following.new_slots = [0]
    for steps in (first, last):
        steps.begin(plan(1), 1, old)
        if steps is first:
            leave(first, 1.0, 1)
        departure = steps.end(1, old, None)
        assert departure is not None
        departure(ints([42]))
    first.begin(plan(2), 1, following)
    assert tokens.stored == [[[0], [5], [42]]]


def test_captures_go_on_while_a_stage_waits(two: Two) -> None:
    first, last, _ = two
    seen = []

    class Waiting:
        def __enter__(self) -> None:
            seen.append("waits")
            departure = first.end(1, nothing, None)
            assert departure is not None
            departure(ints([]))

        def __exit__(self, *error: object) -> None:
            seen.append("goes on")

    nothing = work([], 0)
    first.begin(plan(1), 1, nothing)
    last._waiting = cast("Any", Waiting)
    last.begin(plan(1), 1, nothing)
    assert seen == ["waits", "goes on"]


def test_a_closed_connection_ends_the_wait(two: Two) -> None:
    first, last, _ = two
    first._ring.close()
    with pytest.raises(EngineError, match="rank 1 has lost rank 0"):
        last.begin(plan(1), 1, work([0], 1))
