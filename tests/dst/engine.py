"""The oracle without a device: plans are checked by the executor's own batch, tokens follow from a hash of the cache.
Sequences that have a grammar are kept to it by the executor's own code.

As in :mod:`pagebus.actors.executor.models.oracle`, a token is a function of everything that the cache holds of its
sequence, so that a block lost, mixed up or given away too early cannot go unseen. Some machines serve a model with
windows in some layers: what these would read is checked too. It takes the place of
:class:`pagebus.actors.executor.engine.Engine`, whose threads and device cannot be had again from a seed.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from pagebus.actors.executor.batch.batch import BatchLimits, PersistentBatch
from pagebus.actors.executor.batch.results import ResultBuilder
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.errors import EngineError, PlanError
from pagebus.actors.executor.loading.loaded import EngineInfo
from pagebus.actors.executor.step.completion import EngineStats
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.window import Window
from pagebus.actors.settings import Settings
from pagebus.bus.messages import FromExecutor, NewSequence, StepPlan
from tests.dst.constrained import Constrained
from tests.dst.oracles.pulls import Links, Pulls

MASK = 2**64 - 1
NO_PAGE = -1
BLOCK_SIZE, MOST_BATCHED = 16, 64
"""The largest blocks and steps of a world."""


@dataclass(slots=True)
class Machine:
    """What all executors of a world have in common. ``windowed_pages`` and ``windowed_tokens`` are those of
    :class:`BatchLimits`; blocks are pages then."""

    rng: random.Random
    num_blocks: int = 24
    num_host_blocks: int = 0
    step_s: tuple[float, float] = (0.002, 0.02)
    load_s: tuple[float, float] = (0.05, 1.0)
    most_copy_lag: int = 2
    windowed_pages: int = 0
    windowed_tokens: int = 0
    num_drafts: int = 0
    oracle: Callable[..., Oracle] | None = None
    """What computes, if not an :class:`Oracle`."""
    accepted: list[int] = field(default_factory=list)
    """Drafts that were right, by row that verified some."""
    links: Links | None = None
    """By which blocks move, if they do."""


def chain(prefix: int, token: int) -> int:
    """Hash of a prefix and one more token."""
    mixed = (prefix * 6364136223846793005 + token * 1442695040888963407 + 1) & MASK
    return mixed ^ (mixed >> 29)


def with_windows(machine: Machine, rng: random.Random) -> Machine:
    """The machine, in half of the cases with a model that has windows in some layers. Then there is room for as many
    tokens as before, or the windowed pages are those of one window and a step, or of one window."""
    if rng.random() < 0.5:
        return machine
    each, window = rng.choice((1, 2, 3)), rng.choice((1, 10, 24, 40))
    seen = Window(window, BLOCK_SIZE)
    held = rng.choice((machine.num_blocks, seen.most_blocks(MOST_BATCHED), seen.most_blocks(1)))
    return replace(
        machine,
        num_blocks=machine.num_blocks + each * held,
        num_host_blocks=machine.num_host_blocks * (1 + each),
        windowed_pages=each,
        windowed_tokens=window,
    )


def with_pulls(machine: Machine, rng: random.Random) -> Machine:
    """The machine, in two thirds of the cases with executors that pull blocks from each other. Where steps take long,
    drains meet more sequences."""
    if rng.random() < 1 / 3:
        return machine
    links = Links(machine.rng, rng.choice((0.0, 0.1, 0.4)), rng.choice((1e5, 1e7, 1e7)))
    links.often = rng.choice(((12, 4, 1), (4, 4, 2)))
    return replace(machine, links=links, step_s=rng.choice((machine.step_s, (0.02, 0.2))))


@dataclass(slots=True)
class Row:
    """A slot: its tokens, and the blocks where its cache lies. ``windowed``: of each block its pages of layers with
    windows, :data:`NO_PAGE` where it has none any more."""

    new: NewSequence
    tokens: list[int]
    blocks: list[int]
    windowed: list[list[int]]
    computed: int
    prefix: int = 0
    hashed: int = 0
    drafts: list[int] = field(default_factory=list)
    """Of executors that speculate: those behind the last token."""

    def next_token(self, vocab_size: int, allowed: np.ndarray | None) -> int:
        for token in self.tokens[self.hashed :]:
            self.prefix = chain(self.prefix, token)
        self.hashed = len(self.tokens)
        noise = self.new.seed & MASK if self.new.sampling.temperature >= 1e-5 else 0
        drawn = chain(self.prefix, noise) >> 17
        return drawn % vocab_size if allowed is None else int(allowed[drawn % len(allowed)])


class Oracle:
    """The device: its cache, and what the batch's slots hold."""

    def __init__(self, limits: BatchLimits, num_host_blocks: int, constrained: Constrained) -> None:
        self.limits = limits
        self.constrained = constrained
        self.rows: dict[int, Row] = {}
        self.cache = np.zeros((limits.num_blocks, limits.block_size), np.int64)
        self.host = np.zeros((num_host_blocks, limits.block_size), np.int64)

    def run(self, plan: StepPlan, work: StepWork) -> np.ndarray:
        """The tokens that a step samples [N]."""
        self._move(plan)
        for slot, start, count in zip(
            plan.slots.tolist(), work.starts.tolist(), plan.num_scheduled.tolist(), strict=True
        ):
            self._write(self.rows[slot], start, start + count)
        allowed = self.constrained.allowed(work)
        slots = enumerate(work.sample_slots.tolist())
        sampled = np.array([self._sample(self.rows[slot], allowed.get(row)) for row, slot in slots], np.int32)
        self.constrained.sampled(work, sampled)
        return sampled

    def _move(self, plan: StepPlan) -> None:
        """All that comes before the pass."""
        for source, target in zip(plan.swap_out_blocks.tolist(), plan.swap_out_hosts.tolist(), strict=True):
            self.host[target] = self.cache[source]
        for source, target in zip(plan.swap_in_hosts.tolist(), plan.swap_in_blocks.tolist(), strict=True):
            self.cache[target] = self.host[source]
        self._change_rows(plan)

    def _change_rows(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots.tolist():
            del self.rows[slot]
        tokens, blocks = plan.new_token_ids.tolist(), plan.new_block_ids.tolist()
        pages = self._by_block(plan.new_windowed)
        for new in plan.new_sequences:
            behind = [[NO_PAGE] * self.limits.windowed_pages] * new.first_windowed
            held = pages[: new.num_blocks - new.first_windowed]
            said = new.num_tokens - new.first_token
            row = Row(new, tokens[:said], blocks[: new.num_blocks], behind + held, new.num_computed_tokens)
            self.rows[new.slot] = row
            del tokens[:said], blocks[: new.num_blocks], pages[: len(held)]
        pages = self._by_block(plan.appended_windowed)
        for slot, block in zip(plan.appended_slots.tolist(), plan.appended_blocks.tolist(), strict=True):
            self.rows[slot].blocks.append(block)
            self.rows[slot].windowed += pages[:1]
            del pages[:1]
        assert not len(plan.cut_slots)
        assert not len(plan.chosen_slots)
        self.cache[plan.copy_targets] = self.cache[plan.copy_sources]
        for new in plan.new_sequences:
            self._recall(self.rows[new.slot])

    def _recall(self, row: Row) -> None:
        """The tokens that were not said of a sequence that enters are those of the cache."""
        count = row.new.first_token
        held = self.cache[row.blocks[: -(-count // self.limits.block_size)]].reshape(-1)[:count] - np.arange(count)
        assert not (held & (1 << 20) - 1).any(), f"the cache of sequence {row.new.sequence_id} has other positions"
        row.tokens[:0] = ((held >> 20) - 1).tolist()

    def _by_block(self, pages: np.ndarray) -> list[list[int]]:
        each = self.limits.windowed_pages
        return pages.reshape(-1, each).tolist() if each else []

    def _write(self, row: Row, start: int, stop: int) -> None:
        size = self.limits.block_size
        for position in range(start, stop):
            self.cache[row.blocks[position // size], position % size] = (row.tokens[position] + 1 << 20) + position
        if self.limits.windowed_pages:
            self._check_window(row, start, start)
            pages, places, own = self._windowed(row, start, stop)
            self.cache[pages, places] = own
        row.computed = stop

    def _windowed(self, row: Row, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of some positions their pages for layers with windows [n, W], the places there, and what they should hold:
        each page something else."""
        positions = np.arange(start, stop)
        pages = np.array(row.windowed)[positions // self.limits.block_size]
        assert (pages >= 0).all(), f"sequence {row.new.sequence_id} has no pages for a window from position {start} on"
        own = (np.array(row.tokens[start:stop], np.int64) + 1 << 20) + positions
        kinds = np.arange(1, pages.shape[1] + 1, dtype=np.int64) << 48
        return pages, (positions % self.limits.block_size)[:, None], own[:, None] + kinds

    def _check_window(self, row: Row, query: int, stop: int) -> None:
        """What the token at ``query`` sees before ``stop`` through layers with windows is its own past."""
        start = max(0, query - self.limits.windowed_tokens + 1)
        if start < stop:
            pages, places, own = self._windowed(row, start, stop)
            wrong = np.argwhere(self.cache[pages, places] != own)
            at = f"position {start + wrong[0][0]} on, page {wrong[0][1] + 1}" if len(wrong) else ""
            assert not at, f"the window of sequence {row.new.sequence_id} is wrong from {at}"

    def _sample(self, row: Row, allowed: np.ndarray | None) -> int:
        count = len(row.tokens)
        held = self.cache[row.blocks[: -(-count // self.limits.block_size)]].reshape(-1)[:count]
        own = (np.array(row.tokens, np.int64) + 1 << 20) + np.arange(count)
        wrong = np.flatnonzero(held != own)
        assert not len(wrong), f"the cache of sequence {row.new.sequence_id} is wrong from position {wrong[0]} on"
        if self.limits.windowed_pages:
            self._check_window(row, count - 1, count)
        token = row.next_token(self.limits.vocab_size, allowed)
        row.tokens.append(token)
        return token


class OracleEngine:
    """What an executor actor knows of an engine; its one thread are timers of the loop."""

    def __init__(
        self,
        machine: Machine,
        settings: Settings,
        config: ModelConfig,
        on_result: Callable[[FromExecutor], None],
        on_error: Callable[[BaseException], None],
        **_: Any,
    ) -> None:
        self.stats = EngineStats()
        self._machine, self._on_result, self._on_error = machine, on_result, on_error
        self._loop = asyncio.get_running_loop()
        self._limits = BatchLimits(
            max_num_seqs=settings.max_num_seqs,
            max_model_len=config.max_position_embeddings,
            max_num_batched_tokens=settings.max_num_batched_tokens or 64,
            block_size=settings.block_size,
            num_blocks=machine.num_blocks,
            vocab_size=config.vocab_size,
            windowed_pages=machine.windowed_pages,
            windowed_tokens=machine.windowed_tokens,
            num_drafts=machine.num_drafts,
        )
        self._batch = PersistentBatch(self._limits)
        self._grammars = Constrained(settings.model, config, self._limits, lambda: machine.rng.random() < 0.5)
        self._oracle = (machine.oracle or Oracle)(self._limits, machine.num_host_blocks, self._grammars)
        self._pulls: Pulls | None = None
        if machine.links is not None:
            self._pulls = Pulls(machine.links, self._oracle.cache, self._oracle.host, on_result)
        self._results = ResultBuilder(settings.max_num_seqs, config.vocab_size)
        self._plans: deque[tuple[StepPlan, int]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._epoch = self._step = self._copied = 0
        self._failure: BaseException | None = None
        self.num_host_blocks = machine.num_host_blocks
        self.graphs_progress = None
        self.kernels: dict[str, str] = {}
        self.estimated_kernels: dict[str, str] = {}
        self.unmatched_entries: list[str] = []

    def expert_tokens(self) -> None:
        """It has no experts."""

    def start(self) -> Future[EngineInfo]:
        """Loading takes a while."""
        ready: Future[EngineInfo] = Future()
        ready.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        info = EngineInfo(
            **asdict(self._limits),
            device="simulated",
            dtype="int64",
            num_host_blocks=self.num_host_blocks,
            block_bytes=1000,
            copy_bytes_per_s=1e6 if self.num_host_blocks else 0.0,
            prefill_tokens_per_s=1e3 if self.num_host_blocks or self._pulls else 0.0,
            kv_kind="simulated" if self._pulls else "",
            kv_address=self._pulls.address if self._pulls else "",
            kv_host="here" if self._pulls and self.num_host_blocks else "",
        )
        self._loop.call_later(self._machine.rng.uniform(*self._machine.load_s), ready.set_result, info)
        return ready

    def submit(self, plan: StepPlan, scheduler_epoch: int) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has ended: {self._failure}")
        self._grammars.prepare(plan)
        if self._pulls is not None:
            self._pulls.take_early(plan, scheduler_epoch)
        self._plans.append((plan, scheduler_epoch))
        if self._timer is None:
            self._begin()

    def stop(self, timeout_s: float = 0.0) -> bool:
        """Run what is queued."""
        if self._timer is not None:
            self._timer.cancel()
        while self._plans and self._failure is None:
            self._run(*self._plans.popleft())
        self.die()
        return True

    def die(self) -> None:
        """Its memory is gone."""
        if self._pulls is not None:
            self._pulls.end()

    def memory_in_use(self) -> None:
        """As on a CPU."""

    def fail(self, error: BaseException) -> None:
        """The device has a fault."""
        if self._failure is None:
            self._failure = error
            self._on_error(error)

    def _begin(self) -> None:
        self._timer = self._loop.call_later(self._machine.rng.uniform(*self._machine.step_s), self._end)

    def _end(self) -> None:
        self._timer = None
        if self._failure is not None:
            return
        try:
            self._run(*self._plans.popleft())
        except Exception as error:
            self.fail(error)
            return
        if self._plans:
            self._begin()

    def _run(self, plan: StepPlan, epoch: int) -> None:
        """As :meth:`Engine._check_order` and :meth:`Engine._step_on_cpu`."""
        if epoch < self._epoch:
            raise PlanError(f"step {plan.step} of scheduler epoch {epoch} came after epoch {self._epoch}")
        if epoch > self._epoch:
            self._batch.reset()
            self._oracle.rows.clear()
            self._grammars.reset()
            self._copied = 0
            if self._pulls is not None:
                self._pulls.begin(epoch)
        elif plan.step != self._step + 1:
            raise PlanError(f"step {plan.step} came after step {self._step}")
        self._epoch, self._step = epoch, plan.step
        work = self._batch.apply(plan)
        self._grammars.apply(plan)
        tokens = self._oracle.run(plan, work)
        if self._pulls is not None:
            self._pulls.take(plan, epoch)
        self._copied = max(self._copied, plan.step - self._machine.rng.randint(0, self._machine.most_copy_lag))
        now_s = self._loop.time()
        result = self._results.build(
            work, tokens, step=plan.step, scheduler_epoch=epoch, received_s=now_s, launched_s=now_s, done_s=now_s,
            copied_step=self._copied,
        )  # fmt: skip
        self.stats.steps += 1
        self._on_result(result)
