"""The executor actor: reads step plans from the bus, hands them to the engine, writes the results back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pagebus.actors.executor.device.errors import EngineError, EngineStalled, is_device_fault
from pagebus.actors.executor.device.gpu_limits import check_gpu
from pagebus.actors.executor.in_thread import in_thread
from pagebus.actors.executor.loading.kernel_cache import KernelBuild, read_compiler_version, tell_compilations
from pagebus.actors.executor.memory.groups import with_groups
from pagebus.actors.executor.metrics.executor import ExecutorMetrics
from pagebus.actors.executor.metrics.kernels import always_dequantized
from pagebus.actors.executor.moves.leaving import Leaving
from pagebus.actors.executor.moves.reports import Reports
from pagebus.actors.executor.preload import import_engine, open_gpu, preload
from pagebus.actors.executor.ranks.same_model import SameModel
from pagebus.actors.executor.sleeping import AWAKE, Sleeping
from pagebus.actors.executor.step_watch import StepWatch
from pagebus.actors.model.config import ModelConfig, resolve_model
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.spec import expert_layers
from pagebus.actors.runtime.actor import RETRY_S, Actor, describe
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.spans import spans_of
from pagebus.bus.contract import FENCE_INDEX, START, Bus, BusError, BusUnavailable, Entry, EntryId
from pagebus.bus.messages import DiskReport, FromExecutor, PullReport, ReplicaFenced, StepPlan, StepResult
from pagebus.bus.outbox import Outbox
from pagebus.kernels.common.target import Target, first_target

if TYPE_CHECKING:  # torch is imported while other things happen
    from pagebus.actors.executor.engine import Engine
    from pagebus.actors.executor.loading.loaded import EngineInfo

STAGE = "executor"
READ_BLOCK_MS = 200
"""Longest wait of one read: an idle executor notices a drain request after this time."""
PROGRESS_INTERVAL_S = 0.2
SWITCH_INTERVAL_S = 0.001
"""Python's thread switch interval: at the default of 5 ms the event loop could delay a launch by more than a step."""
STALL_LOOK_S = 1.0
STOP_FAILED_ENGINE_S = 3.0
EXIT_AFTER_FAULT_S = 10.0
EXIT_DEVICE_FAULT = 70


class ExecutorActor(Actor):
    """The executor of one device. Its lease name is the replica's name; its lease reports the capacities for the
    scheduler."""

    kind: ClassVar[str] = "executor"

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        super().__init__(settings, bus, name)
        self.state = "loading"
        self._phase, self._progress = "imports", 0.0
        self._phase_began_s = self._progress_told_s = time.monotonic()
        self._kernel_build = KernelBuild(settings)
        self._importing = in_thread(import_engine)
        self._finding = in_thread(self._find_model)
        self._building = in_thread(self._build_kernels)
        self._position = START
        self._info: EngineInfo | None = None
        self._engine: Engine | None = None
        self._outbox: Outbox | None = None
        self._failure: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._same_model = SameModel(bus, settings)
        self._watch, self._step_timeout_s = StepWatch(), settings.step_timeout_s
        self._sleeping, self._leaving = Sleeping(bus, self.metrics, name), Leaving(settings.drain_timeout_s)
        self._measured, self._spans = ExecutorMetrics(self.metrics, name), spans_of(settings, name)
        self._reports = Reports()

    @property
    def replica(self) -> str:
        """The name of the replica whose plans it computes."""
        return self.name

    @property
    def generation(self) -> int:
        """The epoch of the replica's lease; plans with another one are skipped."""
        return self.epoch

    def lease_info(self) -> dict[str, Any]:
        """The base's fields; the epoch of the scheduler whose plans it read last; progress and phase of loading; once
        ready, the engine's capacities, whether its steps advance, and the number of captured CUDA graphs."""
        told = asdict(self._info) if self._info is not None else {}
        if self._info is not None and self._engine is not None:
            told["num_host_blocks"] = self._engine.num_host_blocks
            told["stalled_s"] = round(self._watch.stalled_s, 1)
            if graphs := self._engine.graphs_progress:
                told["num_graphs"], told["num_planned_graphs"] = graphs
        told |= {"progress": self._progress, "phase": self._phase, "scheduler_epoch": self._position.epoch}
        return {**super().lease_info(), **self._same_model.told, **told}

    # -- life ---------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Load the model. Plans already in the stream were meant for an earlier executor and are skipped."""
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        found = await self._unless_away(lambda: self.bus.last_id(self.names.steps(self.replica)))
        self._position = found or START  # None: a drain was requested while the bus was away
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        began_s = self._phase_began_s = time.monotonic()
        path, config, _ = await asyncio.wrap_future(self._finding)
        await self._unless_away(lambda: self._same_model.confirm(path))
        module = await asyncio.wrap_future(self._importing)
        await self._unless_away(lambda: self._sleeping.wait(self.set_state))
        config, comm = await self._join(config)
        self._outbox = Outbox(self.bus, self.epoch)
        self._engine = engine = self._make_engine(module, path, config, **comm)
        self.spawn(self._outbox.run(), "outbox")
        self.spawn(self._watch_engine(), "engine")
        self.spawn(self._watch_steps(), "steps")
        try:
            self._info = info = await asyncio.wrap_future(engine.start())
        except Exception as error:
            self._end_process_if_faulted(error)
            raise
        self._show_progress("ready", 1.0)
        self._measured.ready(self.settings, info, expert_layers(config.spec))
        self._sleeping.show(AWAKE)
        self.log.info("engine ready", seconds=round(time.monotonic() - began_s, 2), **info.for_logs())
        self._log_kernels(engine)
        await self.publish_metrics()  # the number of graphs left to capture is there before "ready"

    def _make_engine(self, module: Any, path: Path, config: ModelConfig, **comm: Any) -> Engine:
        """The engine of this part of the model, out of its ``module``; it calls back from its threads."""
        return cast("type[Engine]", module.Engine)(
            self.settings,
            config,
            on_result=lambda result: self._call(self._publish, result),
            on_progress=lambda phase, share: self._call(self._show_progress, phase, share),
            on_error=lambda error: self._call(self._engine_failed, error),
            path=path,
            kernels_ready=self._wait_for_kernels,
            spans=self._spans,
            **comm,
        )

    def _log_kernels(self, engine: Engine) -> None:
        """Log which kernels steps run, and warn of what makes them slow."""
        self.log.info("kernels chosen", **engine.kernels)
        if estimated := engine.estimated_kernels:
            advice = f"pagebus tune {self.settings.model} measures them"
            self.log.info("launch shapes by the cost model", advice=advice, **estimated)
        if slow := always_dequantized(engine.kernels):
            self.log.warning("no kernel reads these weights: they are dequantized for each step", products=slow)
        if engine.unmatched_entries:
            self.log.warning("quantization_config lists what is not there", entries=engine.unmatched_entries)

    async def _join(self, config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
        """The configuration of its part of the model, and further arguments of the engine. Ranks wait for the others
        here."""
        return config, {}

    def _find_model(self) -> tuple[Path, ModelConfig, Target | None]:
        """The model's folder and configuration, and the GPU if there is one to use."""
        target = None if self.settings.device == "cpu" else first_target()
        path = resolve_model(self.settings)
        if target is not None:
            in_thread(open_gpu, self.settings.rank)
            in_thread(self._ready_triton, target)
        config = with_quantization(self.settings, ModelConfig.of(self.settings, path))
        config = with_groups(self.settings, config)
        check_gpu(self.settings, config, target)
        return path, config, target

    def _ready_triton(self, target: Target) -> None:
        preload().triton.wait()
        read_compiler_version(target)
        tell_compilations(self._compiled)

    def _build_kernels(self) -> bool:
        """Compile missing kernels; returns whether all are compiled."""
        _, config, target = self._finding.result()
        return target is None or self._kernel_build.run(config, target)

    def _compiled(self, kernel: str, seconds: float) -> None:
        tell = self.log.info if self._info is None else self.log.warning  # once ready, requests wait for it
        tell("kernel compiled", kernel=kernel, seconds=round(seconds, 2))

    def _wait_for_kernels(self) -> None:
        if not self._building.result():
            self.log.warning("kernels were not compiled ahead: the first steps compile them")

    async def serve(self) -> None:
        """Pass plans to the engine as they arrive; in a drain as long as others may pull blocks from the cache."""
        while not self.draining.is_set() or await self._may_stay():
            await self._read_plans()

    async def _may_stay(self) -> bool:
        return self._info is not None and bool(self._info.kv_address) and await self._leaving.may_stay(self.bus)

    async def _read_plans(self) -> None:
        stream = self.names.steps(self.replica)
        entries = await self._unless_away(lambda: self.bus.read({stream: self._position}, block_ms=READ_BLOCK_MS))
        for entry in entries or ():
            if problem := problem_of(entry):
                await self._unless_away(partial(self.bus.dead_letter, STAGE, entry, problem))
                raise EngineError(f"entry {entry.id} of {entry.stream} {problem}: the batch is lost")
            self._take(entry)

    async def drain(self) -> None:
        """Finish the plans that the engine has, and wait until their results are stored."""
        await self._stop_engine(self.settings.drain_timeout_s)
        if self._outbox is not None:
            await self._outbox.flush()

    async def bequeath(self, error: BaseException) -> None:
        """Write the fence behind the computed results, so that the scheduler need not wait for the lease to end."""
        if self._outbox is None or self._info is None or isinstance(error, BusError):
            return
        await self._stop_engine(STOP_FAILED_ENGINE_S)
        fence = ReplicaFenced(replica=self.name, reason=describe(error), error=type(error).__name__)
        self._outbox.append_at(self.names.results(self.name), EntryId(self.epoch, FENCE_INDEX), fence)
        await self._outbox.flush()

    def bus_restarted(self) -> None:
        """Repeat reports; end if a result was lost, for which readers would wait forever."""
        if self._outbox is not None:
            self._outbox.bus_restarted()
            for report in self._reports.take():
                self._publish(report)

    async def stop(self) -> None:
        """End the engine's threads."""
        self._kernel_build.stop()
        await self._stop_engine(STOP_FAILED_ENGINE_S)
        if self._spans is not None:
            self._spans.write()
        if self._failure is not None:
            self._failure.cancel()

    async def _stop_engine(self, timeout_s: float) -> None:
        if self._engine is None:
            return
        # Not in the loop's pool: where a program ends with an LLM in it, there are no pools any more.
        if not await asyncio.wrap_future(in_thread(self._engine.stop, timeout_s)):
            self.log.warning("engine did not end in time", after_s=timeout_s)

    async def measure(self) -> None:
        """Update the metrics of graphs and device memory. Memory is read in a thread, because the driver may be busy. A
        failed GPU is reported by the engine."""
        if self._info is None or self._engine is None or self._failure is None or self._failure.done():
            return
        engine = self._engine
        if self._measured.show_graphs(engine.graphs_progress):
            self.renew_soon()
        self._measured.update(engine.stats.kernels, engine.expert_tokens())
        with contextlib.suppress(RuntimeError):
            if memory := await asyncio.to_thread(engine.memory_in_use):
                self._measured.show_memory(memory)

    # -- plans in, results out ----------------------------------------------------------------------------------------
    def _take(self, entry: Entry) -> None:
        assert self._engine is not None
        plan = entry.message
        assert isinstance(plan, StepPlan)
        self._position = entry.id
        if plan.executor_epoch not in (0, self.generation):
            return  # meant for the executor that had this name before
        self._leaving.take(plan)
        self._watch.submitted(plan, entry.id.epoch)
        self._engine.submit(plan, entry.id.epoch)

    def _publish(self, result: FromExecutor) -> None:
        assert self._outbox is not None
        if isinstance(result, DiskReport) and result.error:
            self.log.warning("the disk tier failed: blocks are computed", error=result.error)
        if isinstance(result, PullReport) and not result.promised:
            self._watch.pulled(result.pull)
            if result.error:
                self.log.warning("blocks could not be had and are computed", pull=result.pull, error=result.error)
        try:
            if not isinstance(result, StepResult):
                told = self._reports.note(result, self.replica, self.generation)
                self._outbox.publish(self.names.control, told)
                return self._outbox.hurry()
            self._outbox.append(self.names.results(self.name), result)
            self._outbox.hurry()
            self._count(result)
        except BusUnavailable as error:  # the outbox has stopped: this executor has been replaced
            self._engine_failed(error)

    def _count(self, result: StepResult) -> None:
        """Add a finished step to the watch and to the metrics."""
        assert self._engine is not None
        self._watch.done()
        self._measured.step_done(result, self._engine.stats)

    async def _unless_away(self, call: Callable[[], Any]) -> Any:
        """The result of ``call``, retried while the bus is away; None if a drain is requested meanwhile."""
        told = False
        while True:
            try:
                return await call()
            except BusUnavailable as error:
                if not told:
                    self.log.warning("bus unavailable", error=describe(error))
                told = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self.draining.wait()
            if self.draining.is_set():
                return None

    # -- what the engine's threads say --------------------------------------------------------------------------------
    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Run ``function`` on the event loop, from another thread; does nothing once the loop is closed."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def _show_progress(self, phase: str, share: float) -> None:
        now = time.monotonic()
        if phase == self._phase and share < 1.0 and now - self._progress_told_s < PROGRESS_INTERVAL_S:
            return
        if phase != self._phase:
            self.log.info("phase done", phase=self._phase, seconds=round(now - self._phase_began_s, 2))
            self._phase_began_s = now
        self._phase, self._progress, self._progress_told_s = phase, round(share, 3), now
        if self._info is None:
            self.renew_soon()

    def _engine_failed(self, error: BaseException) -> None:
        self._end_process_if_faulted(error)
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _watch_engine(self) -> None:
        """End the actor with the engine's error."""
        assert self._failure is not None
        await self._failure

    async def _watch_steps(self) -> None:
        """End the process if the device hangs, so that others compute its sequences again."""
        while not (problem := self._watch.problem(self._step_timeout_s)):  # noqa: ASYNC110 (time passes)
            await asyncio.sleep(STALL_LOOK_S)
        self._engine_failed(EngineStalled(f"{self.name}: {problem}"))

    def _end_process_if_faulted(self, error: BaseException) -> None:
        """Make sure that the process ends: after a CUDA fault no call to the device may ever return, even at exit."""
        if is_device_fault(error):
            self.log.error("device fault: this process ends", error=describe(error))
            timer = threading.Timer(EXIT_AFTER_FAULT_S, os._exit, (EXIT_DEVICE_FAULT,))
            timer.daemon = True
            timer.start()


def problem_of(entry: Entry) -> str:
    """The reason why an entry is not the expected step plan; empty if it is."""
    if not isinstance(entry.message, StepPlan):
        return f"is no step plan ({entry.error or type(entry.message).__name__})"
    return "" if entry.message.step == entry.id.index else f"says it is step {entry.message.step}"
