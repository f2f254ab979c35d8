"""The executor actor on the memory bus: its lease, plans in, results out, drain, and every way to end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.executor.actor import ExecutorActor
from pagebus.actors.executor.device.errors import EngineError, EngineStalled, PlanError, is_device_fault
from pagebus.actors.executor.engine import Engine
from pagebus.actors.executor.in_thread import in_thread
from pagebus.actors.model.config import ModelError
from pagebus.actors.runtime.actor import metrics_state
from pagebus.actors.settings import Settings
from pagebus.bus.contract import FENCE_INDEX, START, EntryId, Fenced, LogEntry
from pagebus.bus.dead_letters import read_dead_letters
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.bus.messages import ReplicaFenced, SequenceEnded, StepPlan, StepResult
from pagebus.bus.streams import Names
from tests.helpers.engine_driver import scheduler_for
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate
from tests.helpers.waiting import LIMIT_S

NAME = "executor-0"
NAMES = Names()
STEPS, RESULTS = NAMES.steps(NAME), NAMES.results(NAME)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[0])


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(
        model=str(folder), device="cpu", threads=1, max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=20,
        **changes,
    )  # fmt: skip


class World:
    """An executor on a bus, and the scheduler's side of that bus."""

    def __init__(self, server: MemoryServer, settings: Settings) -> None:
        self.server = server
        self.bus = MemoryBus(server)
        self.actor = ExecutorActor(settings, MemoryBus(server), NAME)
        self.running = asyncio.create_task(self.actor.run())
        self.position = START

    async def until_state(self, state: str, **info: Any) -> dict[str, Any]:
        """The lease's info once it says ``state``, and what else is wanted."""
        async with asyncio.timeout(LIMIT_S):
            while not self.running.done():
                for lease in await self.bus.leases("executor"):
                    if lease.info.items() >= {"state": state, **info}.items():
                        return dict(lease.info)
                await asyncio.sleep(0.01)
        await self.running
        raise AssertionError("the actor ended")

    async def send(self, plan: StepPlan, epoch: int) -> None:
        await self.bus.append([LogEntry(STEPS, EntryId(epoch, plan.step), plan)])

    async def result(self) -> StepResult:
        """The next result."""
        async with asyncio.timeout(LIMIT_S):
            while not (entries := await self.bus.read({RESULTS: self.position}, count=1, block_ms=100)):
                if self.running.done():
                    await self.running
        self.position = entries[0].id
        assert isinstance(entries[0].message, StepResult)
        return entries[0].message

    async def ended(self) -> None:
        """Wait for the actor to end; raises what ended it."""
        async with asyncio.timeout(LIMIT_S):
            await self.running


@asynccontextmanager
async def world(settings: Settings, server: MemoryServer | None = None) -> AsyncIterator[World]:
    made = World(server or MemoryServer(), settings)
    try:
        yield made
    finally:
        made.actor.request_drain()
        await asyncio.wait([made.running], timeout=LIMIT_S)


def empty_plan(step: int = 1) -> StepPlan:
    return StepPlan(step=step, planned_s=0.0, num_decodes=0)


async def test_a_ready_executor_says_what_it_can_hold(folder: Path) -> None:
    """The lease carries everything that the scheduler plans by."""
    async with world(settings(folder)) as running:
        info = await running.until_state("ready")

    wanted = {
        "progress": 1.0,
        "stalled_s": 0.0,
        "num_blocks": 20,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_model_len": 64,
    }
    assert info.items() >= (wanted | {"vocab_size": 307, "max_num_batched_tokens": 2048}).items()


async def test_metrics_say_what_the_cache_is_made_of(folder: Path) -> None:
    """A float8 cache is named, by torch's name, and its blocks take a quarter of float32's bytes."""
    infos = []
    for dtype in ("auto", "fp8"):
        async with world(settings(folder, kv_cache_dtype=dtype)) as running:
            infos.append(await running.until_state("ready"))
            labels = {name: labels for name, labels, _ in running.actor.metrics.snapshot()["series"]}

    assert labels["vllm:cache_config_info"].items() >= {
        ("cache_dtype", "float8_e4m3fn"), ("block_size", "16"), ("num_gpu_blocks", "20"),
    }  # fmt: skip
    assert [info["kv_cache_dtype"] for info in infos] == ["float32", "float8_e4m3fn"]
    assert infos[0]["block_bytes"] == 4 * infos[1]["block_bytes"]


async def test_plans_become_results(folder: Path) -> None:
    """A sequence over the bus has the tokens of transformers; results are numbered 1, 2, ... in the lease's epoch."""
    async with world(settings(folder)) as running:
        scheduler = scheduler_for(await running.until_state("ready"))
        sequence = scheduler.add(PROMPT, 6)
        while (plan := scheduler.plan()) is not None:
            await running.send(plan, epoch=5)
            scheduler.process(await running.result())
        await running.actor.measure()
        series = running.actor.metrics.snapshot()["series"]
        snapshot = {name: data for name, _, data in series}
        paths = {labels["path"]: data["value"] for _, labels, data in series if "path" in labels}
        products = {labels["product"]: labels["kernel"] for _, labels, _ in series if "product" in labels}

    assert sequence.output == reference_generate(folder, [PROMPT], 6)[0]
    assert running.position == EntryId(running.actor.epoch, scheduler.step)
    assert snapshot["pagebus:executor_steps_total"]["value"] == scheduler.step
    assert snapshot["pagebus:executor_busy_seconds_total"]["value"] > 0
    assert paths == {"cpu": scheduler.step - 1}  # the last one only frees a slot
    assert products == dict.fromkeys(("qkv", "o", "gate_up", "down", "lm_head"), "torch")


async def test_plans_of_an_earlier_life_are_passed_over(folder: Path) -> None:
    """What lay in the stream when the lease was taken was planned for a batch that is gone."""
    server = MemoryServer()
    await MemoryBus(server).append([LogEntry(STEPS, EntryId(3, step), empty_plan(step)) for step in (1, 2)])
    async with world(settings(folder), server) as running:
        await running.until_state("ready")
        await running.send(empty_plan(3), epoch=3)

        assert (await running.result()).step == 3


async def test_a_plan_for_the_executor_before_is_passed_over(folder: Path) -> None:
    """A plan that names the lease epoch of another executor is not run and gets no result."""
    async with world(settings(folder)) as running:
        await running.until_state("ready")
        other = running.actor.epoch + 1
        await running.send(StepPlan(step=1, planned_s=0.0, num_decodes=0, executor_epoch=other), epoch=5)
        await running.send(StepPlan(step=2, planned_s=0.0, num_decodes=0, executor_epoch=other - 1), epoch=5)

        assert (await running.result()).step == 2


async def test_a_drain_finishes_the_plans_it_has(folder: Path) -> None:
    """Their results are on the bus when the lease is given back, and the actor ends well."""
    async with world(settings(folder)) as running:
        scheduler = scheduler_for(await running.until_state("ready"))
        scheduler.add(PROMPT, 4)
        for _ in range(3):
            plan = scheduler.plan()
            assert plan is not None
            await running.send(plan, epoch=1)
        await running.result()

        running.actor.request_drain()
        await running.ended()

        assert [(await running.result()).step for _ in range(2)] == [2, 3]
        assert await running.bus.leases("executor") == []


async def test_a_drain_while_loading_ends_well(folder: Path) -> None:
    """Nobody waits for a model that is not wanted any more."""
    async with world(settings(folder)) as running:
        await running.until_state("loading")
        running.actor.request_drain()
        await running.ended()


async def test_a_plan_that_breaks_a_rule_ends_the_actor(folder: Path) -> None:
    """Visibly: run() raises the engine's error, and the lease is given back."""
    async with world(settings(folder)) as running:
        await running.until_state("ready")
        bad = StepPlan(step=1, planned_s=0.0, num_decodes=1)
        await running.send(bad, epoch=1)

        with pytest.raises(PlanError, match="step 1 of scheduler epoch 1"):
            await running.ended()
        assert await running.bus.leases("executor") == []


@pytest.mark.parametrize(
    "entry",
    [
        LogEntry(STEPS, EntryId(1, 1), SequenceEnded(sequence_id=1, reason="abort")),
        LogEntry(STEPS, EntryId(1, 1), empty_plan(2)),
    ],
    ids=["no plan", "wrong number"],
)
async def test_an_entry_that_is_not_its_plan_ends_the_actor(folder: Path, entry: LogEntry) -> None:
    """A lost plan would make every later one wrong. The entry is kept."""
    async with world(settings(folder)) as running:
        await running.until_state("ready")
        await running.bus.append([entry])

        with pytest.raises(EngineError, match="entry 1-1"):
            await running.ended()
        (letter,) = await read_dead_letters(running.bus, Names(), "executor")
        assert (letter.message, letter.source) == (entry.message, STEPS)


async def test_a_gpus_memory_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in use and what there is, as often as metrics are published; a CPU has none, and a GPU that does not
    answer is no failure of its own."""
    names = {"pagebus:gpu_memory_bytes", "pagebus:gpu_memory_capacity_bytes"}

    def told(actor: ExecutorActor) -> dict[str, float]:
        return {name: data["value"] for name, _, data in actor.metrics.snapshot()["series"] if name in names}

    async with world(settings(folder)) as running:
        await running.until_state("ready")
        await running.actor.measure()
        assert told(running.actor) == {}
        monkeypatch.setattr("pagebus.actors.executor.engine.memory_in_use", lambda device: (3 * 2**30, 141 * 2**30))
        await running.actor.measure()
        assert set(told(running.actor).items()) == set(zip(sorted(names), (3 * 2**30, 141 * 2**30), strict=True))

        def failed(device: object) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        monkeypatch.setattr("pagebus.actors.executor.engine.memory_in_use", failed)
        await running.actor.measure()


async def test_how_far_captures_are_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the lease and in a metric that is there as soon as the executor is ready; the lease says at once when all are
    there. A CPU has none."""

    async def shown(running: World) -> list[tuple[str, float]]:
        (snapshot,) = await running.bus.get_state(metrics_state("executor", NAME))
        series = [] if snapshot is None else snapshot["series"]
        return [(labels["state"], data["value"]) for name, labels, data in series if name == "pagebus:cuda_graphs"]

    async with world(settings(folder)) as running:
        assert "num_graphs" not in await running.until_state("ready")
        assert await shown(running) == []
    progress = [(3, 8)]
    monkeypatch.setattr(Engine, "graphs_progress", property(lambda engine: progress[-1]))
    async with world(settings(folder, lease_ttl_s=60.0)) as running:
        info = await running.until_state("ready")
        assert (info["num_graphs"], info["num_planned_graphs"]) == (3, 8)
        assert await shown(running) == [("captured", 3), ("planned", 8)]
        progress.append((8, 8))
        await running.actor.publish_metrics()
        assert await shown(running) == [("captured", 8), ("planned", 8)]
        await running.until_state("ready", num_graphs=8)


async def test_a_fenced_executor_ends_with_its_first_write(folder: Path) -> None:
    """The scheduler gave it up: it must write nothing more."""
    async with world(settings(folder)) as running:
        await running.until_state("ready")
        fence = ReplicaFenced(replica=NAME, reason="silent")
        await running.bus.append([LogEntry(RESULTS, EntryId(running.actor.epoch, FENCE_INDEX), fence)])
        await running.send(empty_plan(), epoch=1)

        with pytest.raises(Fenced):
            await running.ended()


async def test_a_model_that_cannot_be_loaded_ends_the_actor(tmp_path: Path) -> None:
    """With the model's own error, which the process turns into its exit code."""
    async with world(settings(tmp_path)) as running:
        with pytest.raises(ModelError, match=r"config\.json"):
            await running.ended()


async def test_an_engine_that_fails_later_ends_the_actor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its thread raises reaches run(), and closes the results after those that there are."""

    def broken(*args: object) -> None:
        raise RuntimeError("device lost")

    async with world(settings(folder)) as running:
        await running.until_state("ready")
        engine: Any = running.actor._engine
        await running.send(empty_plan(), epoch=1)
        await running.result()
        monkeypatch.setattr(engine._loaded.runner, "run", broken)
        await running.send(empty_plan(2), epoch=1)

        with pytest.raises(RuntimeError, match="device lost"):
            await running.ended()
        (last,) = await running.bus.read({RESULTS: running.position}, block_ms=0)
        fence = ReplicaFenced(replica=NAME, reason="RuntimeError: device lost", error="RuntimeError")
        assert (last.id.index, last.message) == (FENCE_INDEX, fence)


async def test_an_executor_whose_steps_do_not_advance_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that never returns: the actor ends with an error that says so, and the end of its process is armed."""
    monkeypatch.setattr("pagebus.actors.executor.step_watch.LEAST_PATIENCE_S", 0.0)
    monkeypatch.setattr("pagebus.actors.executor.actor.STALL_LOOK_S", 0.01)
    hung, armed = threading.Event(), []

    def arm(self: ExecutorActor, error: BaseException) -> None:
        armed.append(is_device_fault(error))
        hung.set()  # so that the test's own process gets rid of the thread

    monkeypatch.setattr(ExecutorActor, "_end_process_if_faulted", arm)
    async with world(settings(folder, step_timeout_s=1)) as running:
        await running.until_state("ready")
        engine: Any = running.actor._engine
        run = engine._loaded.runner.run
        monkeypatch.setattr(engine._loaded.runner, "run", lambda work: (hung.wait(), run(work))[1])
        await running.send(empty_plan(), epoch=1)

        with pytest.raises(EngineStalled, match=r"step \d+ has not been computed for 1 s"):
            await running.ended()
    assert armed == [True]


async def test_a_device_fault_arms_the_end_of_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken CUDA context may hang every later call, so a timer ends the process whatever happens."""
    armed: list[tuple[float, Callable[..., Any], tuple[int]]] = []

    class Timer:
        daemon = False

        def __init__(self, after_s: float, function: Callable[..., Any], args: tuple[int]) -> None:
            armed.append((after_s, function, args))

        def start(self) -> None:
            assert self.daemon

    monkeypatch.setattr("pagebus.actors.executor.actor.threading.Timer", Timer)
    actor = ExecutorActor(settings(folder), MemoryBus(MemoryServer()), NAME)

    actor._end_process_if_faulted(RuntimeError("something else"))
    actor._end_process_if_faulted(RuntimeError("CUDA error: an illegal memory access was encountered"))

    assert [args for _, _, args in armed] == [(70,)]


def test_what_nobody_waits_for_any_more_ends_quietly() -> None:
    """An executor that is told to end while it loads: no traceback of the thread that loads."""
    goes_on, problems = threading.Event(), []

    def work_of_a_test() -> None:
        goes_on.wait()
        raise ValueError("nobody wants to know")

    before, threading.excepthook = threading.excepthook, problems.append
    try:
        for work in (goes_on.wait, work_of_a_test):
            goes_on.clear()
            earlier = set(threading.enumerate())
            future = in_thread(work)
            (thread,) = set(threading.enumerate()) - earlier
            assert future.cancel()
            goes_on.set()
            thread.join()
    finally:
        threading.excepthook = before
    assert problems == []
