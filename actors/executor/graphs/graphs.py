"""CUDA graphs of steps, one per bucket, all in one memory pool.

A graph holds everything between the upload and the read-back: inputs from the slots, forward, logits of the rows that
sample, plain sampling, store. It reads rows, lengths and tables from device memory at fixed addresses, so one graph
serves any content. Sampling beyond plain sampling is a second graph behind it
(:mod:`pagebus.actors.executor.graphs.resampling`), captured once a step has missed it. Passes of a draft head are
graphs of their own, before a step's and behind it (:mod:`pagebus.actors.executor.graphs.head_passes`).

A few graphs are captured before the engine is ready. They need every kernel that exists, and one of them fits any step
that another graph would. A separate thread captures the others beside the steps; capturing computes nothing on the
device.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from pagebus.actors.executor.batch.buckets import Bucket, Buckets
from pagebus.actors.executor.batch.step_work import Extras, StepWork
from pagebus.actors.executor.batch.upload import Uploader
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.graphs.capturing import capturing
from pagebus.actors.executor.graphs.head_passes import (
    Follow,
    Guess,
    Head,
    HeadPass,
    covering_guesses,
    follow_of,
)
from pagebus.actors.executor.graphs.piecewise_graphs import (
    LaunchedPieces,
    Pieces,
    PiecewiseGraphs,
    borrow,
    capture_pieces,
    run_pieces,
)
from pagebus.actors.executor.graphs.resampling import Resampling
from pagebus.actors.executor.layers.adapted.slots import AdapterSlots, sampled
from pagebus.actors.executor.models import Model, Tokens
from pagebus.actors.executor.models.decoder import as_decoder
from pagebus.kernels.cublas.product import set_up_library

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    logits: torch.Tensor
    sampled: torch.Tensor


class Passes(Protocol):
    """What is captured: passes over a cache, as :class:`~pagebus.actors.executor.step.runner.Runner` makes them."""

    model: Model
    kv_cache: torch.Tensor
    buckets: Buckets
    uploader: Uploader
    adapters: AdapterSlots | None

    @property
    def head(self) -> Head | None: ...

    def tokens(self, num_tokens: int) -> Tokens: ...

    def padded_forward(self, bucket: Bucket, pause: Callable[[], object]) -> torch.Tensor: ...

    def sample_plainly(self, logits: torch.Tensor, *, any_random: bool) -> torch.Tensor: ...

    def sample_with_extras(self, extras: Extras, logits: torch.Tensor, *, any_random: bool) -> torch.Tensor: ...


Wanted = Bucket | Resampling | HeadPass
"""The kinds of graphs: passes of a bucket, sampling again, passes of a draft head."""


class Graphs:
    """The graphs of a runner's ``buckets``. The device thread replays what it or :meth:`capture_missing` captured."""

    def __init__(
        self, buckets: Buckets, *, adapters: bool = False, passes: Sequence[HeadPass] = (), alike: bool = False
    ) -> None:
        """``adapters``: also have graphs for steps with adapters. ``passes``: passes of a draft head to have graphs of.
        ``alike``: padding, and what is sampled again, depend on the step alone and not on the graphs that there are, so
        that ranks do the same. Where a graph is missing, the same kernels are launched one by one."""
        self.buckets = buckets
        self._adapters, self._alike = adapters, alike
        self._replayed = False  # whether the last step's pass was
        self._captured: dict[Wanted, _Captured | PiecewiseGraphs | torch.cuda.CUDAGraph | None] = {}
        """None for what cannot be captured."""
        self._later: deque[Wanted] = deque(with_adapted(buckets.later(), adapters=adapters))
        self._later.extend(passes)
        self._planned: set[Wanted] = {*with_adapted(buckets.first(), adapters=adapters), *self._later}
        self._drafting: list[Wanted] = [*with_adapted(buckets.verified, adapters=adapters), *passes]
        """Graphs of steps with drafts, as far as they are not known to be captured."""
        self._missed: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()
        self._asked: set[Wanted] = set()
        self._closed = False
        self._undisturbed = threading.Event()
        self._undisturbed.set()
        self.resting = False
        """Whether nothing is being captured. Any thread."""
        self._pool: Any = None
        self._resampling_pool: Any = None
        """A pool of its own: these graphs read what a pass leaves in the other one."""

    def bucket(self, work: StepWork, *, adapted: bool = False) -> Bucket | None:
        """The bucket to pad the step to: that of the smallest captured graph that holds it; None: it runs without.

        If a smaller graph could be captured, it is captured next.
        """
        found = self.buckets.fitting(work)
        if found is None or (adapted and found.pieces):
            return None
        bucket = replace(found, adapted=adapted)
        if bucket in self._captured:
            return bucket
        self._ask(bucket)
        if self._alike:
            return bucket
        larger = (replace(each, adapted=adapted) for each in self.buckets.above(found))
        return next((each for each in larger if each in self._captured), None)

    def run(self, bucket: Bucket, runner: Passes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Launch a pass padded to a bucket from :meth:`bucket`, from its graph if there is one. Returns states
        [rows, H], logits [rows, V] float32 and tokens [rows], valid until the next replay; see :func:`padded_pass`."""
        captured = self._captured.get(bucket)
        self._replayed = captured is not None
        if captured is None:
            return padded_pass(runner, bucket)
        assert isinstance(captured, _Captured)
        captured.graph.replay()
        return captured.hidden, captured.logits, captured.sampled

    def can_resample(self, wanted: Resampling) -> bool:
        """Whether :meth:`resample` can do it. If its graph is missing and could be captured, it is captured next."""
        if wanted not in self._captured:
            self._ask(wanted)
        return self._alike or self._captured.get(wanted) is not None

    def resample(self, wanted: Resampling, runner: Passes, logits: torch.Tensor) -> torch.Tensor:
        """Launch it behind the pass of its bucket, which gave ``logits``, from a graph if that pass was one. Returns
        tokens [rows], valid until another one is launched."""
        captured = self._captured.get(wanted) if self._replayed else None
        if captured is None:
            return runner.sample_with_extras(wanted.extras, logits, any_random=True)
        assert isinstance(captured, _Captured)
        captured.graph.replay()
        return captured.sampled

    def guess(self, count: int) -> Guess | None:
        """The size to pad a head's guesses for ``count`` sequences to, as :meth:`bucket` chooses it, or one that is not
        captured yet. None: there are too many."""
        sizes = map(Guess, self.buckets.row_sizes(count))
        own = next(sizes, None)
        if own is None or self._alike or self._captured.get(own) is not None:
            return own
        self._ask(own)
        return next((each for each in sizes if self._captured.get(each) is not None), own)

    def run_head(self, wanted: HeadPass) -> bool:
        """Launch it from its graph. False: there is none; if it could be captured, it is captured next."""
        graph = self._captured.get(wanted)
        if graph is None:
            self._ask(wanted)
            return False
        assert isinstance(graph, torch.cuda.CUDAGraph)
        graph.replay()
        return True

    def can_verify(self) -> bool:
        """Whether all graphs of steps with drafts are captured. One that is missing is captured next; the others follow
        one at a time, so that graphs for plain steps need not wait for all of them. One thread, any."""
        if self._drafting:
            self._drafting = [each for each in self._drafting if each not in self._captured]
            if self._drafting:
                self._ask(self._drafting[0])
        return not self._drafting

    def _ask(self, wanted: Wanted) -> None:
        if wanted not in self._asked:
            self._asked.add(wanted)
            self._planned.add(wanted)
            self._missed.put(wanted)

    def pieces(self, bucket: Bucket) -> Pieces:
        """The pieces of a step padded to a bucket from :meth:`bucket`, as graphs if they are captured."""
        captured = self._captured.get(bucket)
        if captured is None:
            return LaunchedPieces(bucket.tokens)
        assert isinstance(captured, PiecewiseGraphs)
        return captured

    def capture(self, runner: Passes, progress: Callable[[float], None]) -> None:
        """Capture the first few graphs, the largest first, so that the others find the pool large enough.

        On the meta device, where there is nothing to capture, their passes are run once.
        """
        covering, first = self.buckets.covering_kernels(), self.buckets.first()
        buckets, first = (with_adapted(each, adapters=self._adapters) for each in (covering, first))
        for done, bucket in enumerate(buckets):
            with runner.model.few_layers():
                _run_empty(runner, bucket)  # kernels compiled, library workspaces allocated
            if bucket in first and not runner.kv_cache.is_meta:
                torch.cuda.current_stream().synchronize()
                self._capture(runner, bucket)
            progress((done + 1) / len(buckets))
        if runner.head is not None:
            for guess in covering_guesses(self.buckets):
                runner.head.run(guess)

    def capture_missing(self, runner: Passes, captured: Callable[[float], None] = lambda began_s: None) -> None:
        """Capture missing graphs until :meth:`close`, first those that a step has missed. ``captured`` is called with
        the time when each began. Runs in its own thread and stream.

        No other thread may synchronize with the whole device meanwhile: that fails, and breaks the capture.
        """
        if not runner.kv_cache.is_meta:
            _set_up_library(runner)
        while not self._closed:
            try:
                self.resting = not self._later
                wanted = self._missed.get(block=self.resting)
                self.resting = False
            except queue.Empty:
                wanted = self._later.popleft()
            if wanted is not None and wanted not in self._captured:
                began_s = time.time()
                if isinstance(wanted, Resampling):
                    self._capture_resampling(runner, wanted)
                elif isinstance(wanted, Guess | Follow):
                    self._capture_head(runner, wanted)
                else:
                    self._capture(runner, wanted)
                captured(began_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In this block a capture waits before its next layer. Launching and capturing both need Python's lock all the
        time; side by side they would take several times as long."""
        self._undisturbed.clear()
        try:
            yield
        finally:
            self._undisturbed.set()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """In this block a capture goes on, even within :meth:`paused`: the device thread waits for others anyway."""
        was_paused = not self._undisturbed.is_set()
        self._undisturbed.set()
        try:
            yield
        finally:
            if was_paused:
                self._undisturbed.clear()

    @property
    def progress(self) -> tuple[int, int]:
        """How many graphs are captured, and how many are planned; those that steps have missed are among them. Any
        thread."""
        return len(self._captured), len(self._planned)

    @property
    def complete(self) -> bool:
        """Whether all planned graphs are captured. Any thread."""
        captured, planned = self.progress
        return captured >= planned

    def close(self) -> None:
        """End :meth:`capture_missing` after the graph that it is capturing."""
        self._closed = True
        self._missed.put(None)

    def _capture(self, runner: Passes, bucket: Bucket) -> None:
        pause = self._undisturbed.wait
        try:
            if bucket.pieces:
                tokens = runner.tokens(bucket.tokens)
                self._captured[bucket] = capture_pieces(as_decoder(runner.model), tokens, self._capturing, pause)
                return
            with self._capturing() as graph:
                hidden, logits, sampled = padded_pass(runner, bucket, pause)
        except BaseException as error:
            raise EngineError(
                f"capturing the CUDA graph of {bucket} failed ({error}); --enforce-eager does without"
            ) from error
        sampled = borrow(sampled) if runner.model.passes_on else sampled
        self._captured[bucket] = _Captured(graph, borrow(hidden), borrow(logits), sampled)

    def _capture_resampling(self, runner: Passes, wanted: Resampling) -> None:
        """Steps do without if it fails."""
        captured = self._captured[wanted.bucket]
        assert isinstance(captured, _Captured)
        try:
            self._resampling_pool = self._resampling_pool or torch.cuda.graph_pool_handle()
            with self._capturing(self._resampling_pool) as graph:
                sampled = runner.sample_with_extras(wanted.extras, captured.logits, any_random=True)
        except Exception:
            log.warning("cannot capture sampling of %s", wanted, exc_info=True)
            self._captured[wanted] = None
        else:
            self._captured[wanted] = _Captured(graph, captured.hidden, captured.logits, sampled)

    def _capture_head(self, runner: Passes, wanted: HeadPass) -> None:
        """Steps do without if it fails."""
        assert runner.head is not None
        try:
            with self._capturing() as graph:
                runner.head.run(wanted)
        except Exception:
            log.warning("cannot capture %s of the draft head", wanted, exc_info=True)
            self._captured[wanted] = None
        else:
            self._captured[wanted] = graph

    def _capturing(self, pool: Any = None) -> AbstractContextManager[torch.cuda.CUDAGraph]:
        """:func:`capturing` with the pool of passes, unless another one is given."""
        if pool is None:
            pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        return capturing(pool)


def with_adapted(buckets: list[Bucket], *, adapters: bool) -> list[Bucket]:
    """The buckets, and behind them the same for steps with ``adapters``, if there may be any."""
    more = [replace(each, adapted=True) for each in buckets if adapters and not each.pieces]
    return [*buckets, *more]


def empty_step() -> StepWork:
    """A step without rows, to be padded to a bucket."""
    ints, flags = np.empty(0, np.int32), np.empty(0, np.bool_)
    return StepWork(
        num_decodes=0, num_tokens=0, max_query_len=0, max_context_len=0, slots=ints, starts=ints,
        query_start=np.zeros(1, np.int32), positions=ints, indexes=ints, hidden_index=ints,
        context_lens=ints, sample_slots=ints,
        sequence_ids=ints, length_ended=flags, can_stop=flags, end_ids=ints, deltas={},
    )  # fmt: skip


def padded_pass(
    runner: Passes, bucket: Bucket, pause: Callable[[], object] = lambda: None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The content of a graph: inputs, forward, sampling and store of a padded step. Returns its hidden states, logits
    and tokens; a stage that passes its states on has only these."""
    hidden = runner.padded_forward(bucket, pause)
    if runner.model.passes_on:
        return hidden, hidden, hidden
    with sampled(runner.adapters if bucket.adapted else None, runner.uploader.header.sample_slots[: len(hidden)]):
        logits = runner.model.logits(hidden)
    return hidden, logits, runner.sample_plainly(logits, any_random=True)


def _set_up_library(runner: Passes) -> None:
    """cuBLAS makes itself a handle and a workspace for every thread, which cannot be done while capturing."""
    set_up_library(runner.kv_cache.device)
    for dtype in {torch.float32, runner.model.parameters.dtype}:
        square = torch.zeros(16, 16, dtype=dtype, device=runner.kv_cache.device)
        torch.nn.functional.linear(square, square, square[0])
        torch.mm(square, square)
    torch.cuda.current_stream().synchronize()


def _run_empty(runner: Passes, bucket: Bucket) -> None:
    if bucket.pieces:
        run_pieces(as_decoder(runner.model), runner.tokens(bucket.tokens))
    else:
        runner.uploader.send(empty_step(), bucket)
        padded_pass(runner, bucket)
        if runner.head is not None:
            runner.head.run(follow_of(bucket))


def pool_bytes(runner: Passes, *, adapters: bool) -> int:
    """Bytes that the passes of the largest graphs, whole, with ``adapters`` and in pieces, take on top of what stays:
    the pool will hold them, at worst side by side."""
    taken, pieces = 0, runner.buckets.largest_pieces()
    largest = [runner.buckets.largest()] if pieces is None else [runner.buckets.largest(), pieces]
    for bucket in with_adapted(largest, adapters=adapters):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _run_empty(runner, bucket)
        torch.cuda.synchronize()
        taken += torch.cuda.max_memory_allocated() - before
    return taken
