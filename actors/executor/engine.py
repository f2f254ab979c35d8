"""The engine: one thread launches steps on the device, one waits for their tokens, and one captures graphs.

The device thread takes plans from a queue, in order, applies them to the persistent batch and launches their work. It
never waits for the device, except when as many steps as there are read-back buffers are in flight. The completion
thread passes results on (:mod:`pagebus.actors.executor.step.completion`). On a CPU the pass is done when its launch
returns, and the device thread completes the step itself.

A failure in either thread ends the engine, because later plans would compute nonsense.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.agreement import Agreement
from pagebus.actors.executor.device.comm import ONE_RANK, Comm
from pagebus.actors.executor.device.device import own_stream, prepare_thread, resolve_device, resolve_dtype
from pagebus.actors.executor.device.errors import EngineError, PlanError
from pagebus.actors.executor.graphs.graphs import Graphs
from pagebus.actors.executor.loading.loaded import EngineInfo, Loaded
from pagebus.actors.executor.loading.loading import Progress, load
from pagebus.actors.executor.loading.weights import unmatched_entries
from pagebus.actors.executor.memory.budget import memory_in_use
from pagebus.actors.executor.memory.swap import CopyWatch
from pagebus.actors.executor.ranks.device_stage_steps import steps_of
from pagebus.actors.executor.ranks.drift import DriftCheck
from pagebus.actors.executor.ranks.stage_steps import WholeSteps
from pagebus.actors.executor.sampling.grammars import Grammars
from pagebus.actors.executor.step.completion import Completion, Launched, Queued, give_scores
from pagebus.actors.executor.step.expert_counts import ExpertCounts
from pagebus.actors.executor.step.readback import Readback, ReadbackPool
from pagebus.actors.model.config import ModelConfig, resolve_model, resolve_tokenizer
from pagebus.actors.model.grammars.grammar import load_vocabulary
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.spans import CAPTURE, EAGER, LAUNCH, Spans
from pagebus.bus.messages import FromExecutor, StepPlan

if TYPE_CHECKING:
    from llguidance import LLTokenizer

JOIN_S = 10.0
"""Longest wait of :meth:`Engine.stop` for a thread beyond its queue; a hung device must not hang the process."""
IDLE_S = 0.25
"""Time without a plan after which, and between two shapes of long prompts, one shape may be prepared."""


class Engine:
    """One executor's engine.

    ``on_result`` is called with every step's result, in order, and with what becomes of other orders; ``on_error`` at
    most once with the error that ended the engine, and ``on_progress`` during loading. All are called from the engine's
    threads and must return quickly. ``kernels_ready``, which may wait, is called before the first kernel is launched.
    ``config`` is the part of the rank that ``comm`` connects with the others.
    """

    def __init__(
        self,
        settings: Settings,
        config: ModelConfig,
        on_result: Callable[[FromExecutor], None],
        on_progress: Progress = lambda phase, share: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
        *,
        path: Path | None = None,
        kernels_ready: Callable[[], None] = lambda: None,
        spans: Spans | None = None,
        comm: Comm = ONE_RANK,
    ) -> None:
        self._completion = Completion(settings, config, on_result, spans)
        self.stats, self._tell = self._completion.stats, on_result
        self.ready: Future[EngineInfo] = Future()
        self._settings, self._config, self._path = settings, config, path
        self._kernels_ready, self._spans = kernels_ready, spans
        self._comm, self._agreement = comm, Agreement(comm)
        self._drift, self._copies = DriftCheck(self._agreement), CopyWatch()
        self._on_error, self._on_progress = on_error, on_progress
        self._plans: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._pool: ReadbackPool | None = None
        self._graphs: Graphs | None = None
        self._epoch = 0
        self._step = 0
        self._stopping = False
        self._failure: BaseException | None = None
        self._failing = threading.Lock()
        self._once_grammars: Grammars | None = None
        self._once_loaded: Loaded | None = None
        self._experts: ExpertCounts | None = None
        self._stage = WholeSteps()
        self._threads = [threading.Thread(target=self._device_thread, name="engine-device", daemon=True)]

    # -- for the owner ------------------------------------------------------------------------------------------------
    def start(self) -> Future[EngineInfo]:
        """Start loading in the device thread. The future is done when steps can run, or when loading failed."""
        self.ready.set_running_or_notify_cancel()  # waiters cannot cancel it
        self._threads[0].start()
        return self.ready

    def submit(self, plan: StepPlan, scheduler_epoch: int, received_s: float | None = None) -> None:
        """Queue a plan. Plans run in the order of the calls. ``received_s`` is wall-clock time, now if None.

        Raises:
            EngineError: the engine has ended.
        """
        if self._failure is not None:
            raise EngineError(f"the engine has ended: {self._failure}") from self._failure
        if self._once_grammars is not None:
            self._once_grammars.prepare(plan)
        if plan.pulls:
            self._loaded.begin_pulls(plan, scheduler_epoch)
        self._plans.put(Queued(plan, scheduler_epoch, time.time() if received_s is None else received_s))

    def stop(self, timeout_s: float = JOIN_S) -> bool:
        """Run the queued plans, pass on all results, and end the threads. False if they did not end in time.
        Idempotent."""
        self._stopping = True
        self._plans.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def num_occupied_slots(self) -> int:
        """Slots that hold a sequence; exact only while no plan is queued."""
        return self._loaded.batch.num_occupied

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier that are ready; grows for a while after startup. Any thread."""
        return self._loaded.copies.memory.num_ready

    @property
    def graphs_progress(self) -> tuple[int, int] | None:
        """Captured CUDA graphs and their total; None where steps run without. Any thread."""
        return None if self._graphs is None else self._graphs.progress

    @property
    def kernels(self) -> dict[str, str]:
        """Descriptions of the kernels of steps, once the engine is ready."""
        return self._loaded.runner.chooser.summary()

    @property
    def estimated_kernels(self) -> dict[str, str]:
        """The kernels of products that nobody has measured on this GPU, with what they should take."""
        return self._loaded.runner.chooser.estimated()

    def expert_tokens(self) -> npt.NDArray[np.int64] | None:
        """Tokens so far by layer with experts, and by expert [L, E]; None without any. What the last second has brought
        may be missing. One thread, not one of the engine's."""
        return None if self._experts is None else self._experts.totals()

    @property
    def unmatched_entries(self) -> list[str]:
        """Entries of the checkpoint's quantization that mean no weight, once the engine is ready."""
        return unmatched_entries(self._loaded.runner.model)

    def memory_in_use(self) -> tuple[int, int] | None:
        """Bytes of device memory in use, and in total; None on a CPU. Any thread, once the engine is ready."""
        return memory_in_use(torch.device(self._loaded.info.device))

    # -- device thread ------------------------------------------------------------------------------------------------
    def _device_thread(self) -> None:
        try:
            with torch.inference_mode():
                self._progress("device", 0.0)
                device = resolve_device(self._settings)
                with own_stream(device):
                    self._prepare(device)
                    try:
                        self._run_plans()
                    finally:
                        self._end_capturing()
                    self._free_host_memory()
        except BaseException as error:
            self._fail(error)
        finally:
            if self._once_grammars is not None:
                self._once_grammars.close()
            self._comm.close()
            self._completion.put(None)

    def _prepare(self, device: torch.device) -> None:
        settings, config = self._settings, self._config
        dtype = resolve_dtype(settings, config.dtype, device)
        prepare_thread(settings, device, dtype)
        path = self._path or resolve_model(settings)
        self._once_loaded = load(
            settings, config, path, device, dtype, self._progress, self._kernels_ready, self._agreement, self._tell,
        )  # fmt: skip
        runner = self._loaded.runner
        self._graphs = graphs = runner.graphs
        self._stage = steps_of(self._comm, runner.model, runner.state, None if graphs is None else graphs.resumed)
        limits, pinned = self._loaded.batch.limits, device.type == "cuda"
        self._once_grammars = Grammars(limits, self._load_vocabulary, config.eos_token_ids, pinned=pinned)
        runner.mask_with(self._grammars.masks)
        if device.type == "cuda":
            stream = torch.cuda.current_stream()
            self._pool = ReadbackPool(runner.most_results, runner.uploader.num_buffers, stream)
            runner.uploader.trust_limit()
            completion = threading.Thread(target=self._completion_thread, name="engine-completion", daemon=True)
            self._threads.append(completion)
            completion.start()
        counts = runner.model.parameters.counts
        self._experts = ExpertCounts(counts) if counts else None
        if graphs is not None:
            arguments = (graphs, device, dtype)
            capturing = threading.Thread(target=self._graph_thread, args=arguments, name="engine-graphs", daemon=True)
            self._threads.append(capturing)
            capturing.start()
        self._loaded.copies.memory.lock_rest()
        self.ready.set_result(self._loaded.info)

    def _load_vocabulary(self) -> LLTokenizer:
        return load_vocabulary(resolve_tokenizer(self._settings), self._config)

    def _free_host_memory(self) -> None:
        """Free the host tier's memory after the last plan. A failed device is left alone: its process ends anyway."""
        if self._failure is None:
            if self._pool is not None:
                torch.cuda.synchronize()
            self._loaded.free()

    @property
    def _loaded(self) -> Loaded:
        assert self._once_loaded is not None
        return self._once_loaded

    @property
    def _grammars(self) -> Grammars:
        assert self._once_grammars is not None
        return self._once_grammars

    def _progress(self, phase: str, share: float) -> None:
        """Report progress, and end loading if the engine is being stopped."""
        if self._stopping:
            raise EngineError("stopped while loading")
        self._on_progress(phase, share)

    def _run_plans(self) -> None:
        while (queued := self._next_plan()) is not None:
            if self._failure is not None:
                return
            self._check_order(queued)
            if self._pool is None:
                self._step_on_cpu(queued)
            else:
                readback = self._pool.take()
                with self._captures_paused():
                    self._launch(queued, readback)

    def _next_plan(self) -> Queued | None:
        """Wait for the next plan. Meanwhile, if no step is in flight, prepare for shapes of long prompts."""
        prefill_backend = self._loaded.prefill_backend
        while prefill_backend:
            with suppress(queue.Empty):
                return self._plans.get(timeout=IDLE_S)
            if self._pool is None or self._pool.is_full:
                with self._captures_paused():
                    prefill_backend.prepare_next()
        return self._plans.get()

    def _captures_paused(self) -> AbstractContextManager[None]:
        return nullcontext() if self._graphs is None or self._graphs.resting else self._graphs.paused()

    def _check_order(self, queued: Queued) -> None:
        """Check that plans of one scheduler have no gaps, and empty the batch for a new scheduler."""
        epoch, step = queued.scheduler_epoch, queued.plan.step
        if epoch < self._epoch:
            raise PlanError(f"step {step} of scheduler epoch {epoch} came after epoch {self._epoch}")
        if epoch > self._epoch:
            self._loaded.batch.reset()
            self._grammars.reset()
        elif step != self._step + 1:
            raise PlanError(f"step {step} came after step {self._step}")
        self._epoch, self._step = epoch, step

    def _step_on_cpu(self, queued: Queued) -> None:
        launched_s, began = time.time(), time.perf_counter()
        work, _ = self._apply(queued)
        self._drift.begin(queued.plan, work, queued.plan.step)
        began += self._stage.begin(queued.plan, queued.scheduler_epoch, work)
        sampled = self._run(work)
        self._stage.end(queued.plan.step, work, sampled)
        tokens = sampled.numpy()[: work.num_results] if sampled is not None else np.empty(0, np.int32)
        self._drift.note(tokens)
        give_scores(self._loaded.runner.scores, work)
        if self._experts is not None:
            self._experts.fetch()
        if len(work.constrained) and sampled is not None:
            self._grammars.launched(work)
            self._grammars.landed(tokens)
        busy_s = time.perf_counter() - began
        self.stats.launched(busy_s)
        if self._spans is not None:
            self._spans.add("device", queued.plan.step, launched_s, launched_s + busy_s)
        self._completion.finish(queued, work, tokens, launched_s, busy_s, copied_step=queued.plan.step)

    def _launch(self, queued: Queued, readback: Readback) -> None:
        launched_s, began = time.time(), time.perf_counter()
        promises = self._loaded.follow_promises()
        work, copied = self._apply(queued)
        self._drift.begin(queued.plan, work, self._copies.step_done(queued.plan.step, copied))
        if self._spans is not None:
            self._spans.add("apply", queued.plan.step, launched_s, time.time())
        began += self._stage.begin(queued.plan, queued.scheduler_epoch, work)
        readback.begin()
        sampled = self._run(work)
        departure = self._stage.end(queued.plan.step, work, sampled)
        readback.fetch(sampled, work.num_results, self._loaded.runner.scores, self._agreement.told)
        if self._experts is not None:
            self._experts.fetch()
        if len(work.constrained) and sampled is not None:
            self._grammars.launched(work)
        self._completion.put(Launched(queued, work, launched_s, readback, copied, departure, promises))
        if self._spans is not None:
            name = LAUNCH if self._loaded.runner.from_graph else EAGER
            self._spans.add(name, queued.plan.step, launched_s, time.time())
        self.stats.launched(time.perf_counter() - began)

    def _run(self, work: StepWork) -> torch.Tensor | None:
        sampled, kernels = self._loaded.runner.run(work), self._loaded.runner.kernels
        self._drift.settle(sampled=sampled is not None)
        if kernels is not None:
            self.stats.ran(kernels)
        return sampled

    def _apply(self, queued: Queued) -> tuple[StepWork, torch.cuda.Event | None]:
        """Apply the plan to the batch, and start its copies between the tiers. Returns the work of its step, and what
        the copies set when they are done."""
        try:
            work = self._loaded.batch.apply(queued.plan)
            self._grammars.apply(queued.plan)
            return work, self._loaded.copy(queued.plan, queued.scheduler_epoch)
        except PlanError as error:
            raise PlanError(f"step {queued.plan.step} of scheduler epoch {queued.scheduler_epoch}: {error}") from error

    # -- graphs -------------------------------------------------------------------------------------------------------
    def _graph_thread(self, graphs: Graphs, device: torch.device, dtype: torch.dtype) -> None:
        """Capture the missing graphs beside the steps."""

        def note(began_s: float) -> None:
            if self._spans is not None:
                self._spans.add(CAPTURE, 0, began_s, time.time())

        try:
            with torch.inference_mode(), own_stream(device):
                prepare_thread(self._settings, device, dtype)
                graphs.capture_missing(self._loaded.runner, note)
        except BaseException as error:
            self._fail(error)
            self._plans.put(None)

    def _end_capturing(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
            self._threads[-1].join(JOIN_S)

    # -- completion ---------------------------------------------------------------------------------------------------
    def _completion_thread(self) -> None:
        assert self._pool is not None
        try:
            torch.cuda.set_device(self._loaded.info.device)
            self._completion.run(self._pool, self._grammars, self._comm.check)
        except BaseException as error:
            self._fail(error)
            self._pool.close()  # the device thread may wait for a buffer, or for tokens
            self._grammars.close()
            self._plans.put(None)

    def _fail(self, error: BaseException) -> None:
        with self._failing:
            if self._failure is not None:
                return
            self._failure = error
        if not self.ready.done():
            self.ready.set_exception(error)
        else:
            self._on_error(error)
