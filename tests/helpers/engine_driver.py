"""A scheduler in few lines, for tests and measurements of the engine alone.

:class:`HandScheduler` plans steps as the real one must: decodes first, prompts in chunks under a token budget, the next
step before the last one's tokens are known. :func:`drive` runs an engine with its plans until all sequences have ended.
"""

from __future__ import annotations

import faulthandler
import queue
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from pagebus.actors.executor.engine import Engine
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.settings import Settings
from pagebus.bus.messages import NewSequence, StepPlan, StepResult
from tests.helpers.sampling_fields import gathered
from tests.helpers.waiting import LIMIT_S


def ints(values: Sequence[int]) -> np.ndarray:
    """An int32 array, as plans hold them."""
    return np.array(values, np.int32)


@dataclass(slots=True)
class Grown:
    """One sequence: its prompt, what it has sampled, and how far it is planned."""

    sequence_id: int
    prompt: list[int]
    max_tokens: int
    params: dict[str, Any]
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_computed: int = 0
    output: list[int] = field(default_factory=list)
    end: int = 0

    @property
    def max_total(self) -> int:
        return len(self.prompt) + self.max_tokens


def new_sequence(sequence: Grown) -> NewSequence:
    """The message for a sequence that enters its slot."""
    given: dict[str, Any] = {"seed": 0, "temperature": 0.0} | sequence.params
    return NewSequence(
        sequence_id=sequence.sequence_id,
        slot=sequence.slot,
        num_tokens=len(sequence.prompt) + len(sequence.output),
        num_prompt_tokens=len(sequence.prompt),
        num_computed_tokens=sequence.num_computed,
        num_blocks=len(sequence.blocks),
        max_total_tokens=sequence.max_total,
        **gathered(NewSequence, given),
    )


class HandScheduler:
    """Plans for one engine. Block ids are handed out in a shuffled order, slots the lowest first."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, seed: int = 0) -> None:
        self.free_blocks = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.free_slots = list(range(max_num_seqs))
        self.block_size, self.budget = block_size, budget
        self.waiting: list[Grown] = []
        self.running: list[Grown] = []
        self.all: dict[int, Grown] = {}
        self.freed: list[int] = []
        self.step = 0

    def add(self, prompt: Sequence[int], max_tokens: int, **params: Any) -> Grown:
        """A sequence to compute; ``params`` are fields of :class:`NewSequence` and of its sampling parameters."""
        sequence = Grown(len(self.all) + 1, list(prompt), max_tokens, params)
        self.all[sequence.sequence_id] = sequence
        self.waiting.append(sequence)
        return sequence

    def plan(self) -> StepPlan | None:
        """The next step; None if nothing can be computed and nothing is to be freed."""
        budget, entered, appended = self.budget, [], []
        rows: list[tuple[Grown, int]] = []
        for sequence in self.running:
            todo = min(sequence.num_tokens - sequence.num_computed, budget)
            if todo and sequence.num_tokens < sequence.max_total:
                appended += self._grow(sequence, sequence.num_computed + todo)
                rows.append((sequence, todo))
                budget -= todo
        while self.waiting and self.free_slots and budget:
            sequence = self.waiting[0]
            tokens = len(sequence.prompt) + len(sequence.output)
            if -(-(sequence.max_total + 1) // self.block_size) > len(self.free_blocks):
                break
            self.waiting.pop(0)
            sequence.slot, sequence.num_tokens, sequence.num_computed = self.free_slots.pop(0), tokens, 0
            todo = min(tokens, budget)
            self._grow(sequence, todo)
            self.running.append(sequence)
            entered.append(sequence)
            rows.append((sequence, todo))
            budget -= todo
        if not rows and not self.freed:
            return None
        return self._message(rows, entered, appended)

    def _grow(self, sequence: Grown, num_tokens: int) -> list[tuple[int, int]]:
        added = []
        while len(sequence.blocks) * self.block_size < num_tokens:
            block = self.free_blocks.pop()
            sequence.blocks.append(block)
            added.append((sequence.slot, block))
        return added

    def _message(
        self, rows: list[tuple[Grown, int]], entered: list[Grown], appended: list[tuple[int, int]]
    ) -> StepPlan:
        def is_decode(row: tuple[Grown, int]) -> bool:
            return row[1] == 1 and row[0].num_computed + 1 == row[0].num_tokens

        rows = sorted(rows, key=lambda row: not is_decode(row))
        num_decodes = sum(map(is_decode, rows))
        self.step += 1
        plan = StepPlan(
            step=self.step,
            planned_s=0.0,
            num_decodes=num_decodes,
            freed_slots=ints(self.freed),
            new_sequences=tuple(map(new_sequence, entered)),
            new_token_ids=ints([token for sequence in entered for token in sequence.prompt + sequence.output]),
            new_block_ids=ints([block for sequence in entered for block in sequence.blocks]),
            appended_slots=ints([slot for slot, _ in appended]),
            appended_blocks=ints([block for _, block in appended]),
            slots=ints([sequence.slot for sequence, _ in rows]),
            num_scheduled=ints([count for _, count in rows]),
        )
        self.freed = []
        for sequence, count in rows:
            sequence.num_computed += count
            sequence.num_tokens += sequence.num_computed == sequence.num_tokens
        return plan

    def process(self, result: StepResult) -> None:
        """Take the tokens; sequences that end give slot and blocks back."""
        for sequence_id, token, index, end in zip(
            result.sequence_ids.tolist(), result.token_ids.tolist(), result.token_indexes.tolist(),
            result.ends.tolist(), strict=True,
        ):  # fmt: skip
            sequence = self.all[sequence_id]
            assert sequence.end == 0, "a row of an ended sequence came through"
            assert index == len(sequence.output)
            sequence.output.append(token)
            sequence.end = end
            if end:
                self.release(sequence)

    def release(self, sequence: Grown) -> None:
        """Slot and blocks are free from the next plan on."""
        self.running.remove(sequence)
        self.freed.append(sequence.slot)
        self.free_slots.append(sequence.slot)
        self.free_blocks += sequence.blocks
        sequence.blocks = []

    def preempt(self, sequence: Grown) -> None:
        """Give up what it holds; it waits with the tokens it has. No plan may be in flight."""
        self.release(sequence)
        self.waiting.append(sequence)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.running and not self.freed


def scheduler_for(info: Mapping[str, Any]) -> HandScheduler:
    """For an executor whose lease says this; chunks of 8 tokens."""
    return HandScheduler(info["num_blocks"], info["block_size"], info["max_num_seqs"], 8)


_OPEN: WeakSet[Driver] = WeakSet()
"""Those whose engines run."""


def _await_graphs(drivers: Iterable[Driver]) -> None:
    """Until these engines capture no more graphs."""
    deadline_s = time.monotonic() + LIMIT_S
    every = [graphs for each in drivers if (graphs := each.engine._graphs) is not None]
    while not all(graphs.complete for graphs in every):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


class Driver:
    """An engine with a queue for its results, and for what ended it. ``grouped``: with pages of their own for layers
    with windows, which :class:`HandScheduler` does not know."""

    def __init__(self, path: Path, *, grouped: bool = False, **settings: Any) -> None:
        self.settings = Settings(model=str(path), **settings)
        self.results: queue.Queue[StepResult | BaseException] = queue.Queue()
        self.phases: list[tuple[str, float]] = []
        self.engine = Engine(
            self.settings,
            replace(with_quantization(self.settings, ModelConfig.load(path)), grouped=grouped),
            on_result=self.results.put,
            on_progress=lambda phase, share: self.phases.append((phase, share)),
            on_error=self.results.put,
            path=path,
        )
        _await_graphs(_OPEN)  # a start waits for the device
        self.info = self.engine.start().result(LIMIT_S)
        self.epoch = 0
        _OPEN.add(self)

    def scheduler(self, budget: int | None = None, seed: int = 0) -> HandScheduler:
        """A new scheduler: its epoch is higher than that of the one before."""
        self.epoch += 1
        info = self.info
        return HandScheduler(
            info.num_blocks, info.block_size, info.max_num_seqs, budget or info.max_num_batched_tokens, seed
        )

    def result(self) -> StepResult:
        """The next step's result; raises what ended the engine."""
        result = self.results.get(timeout=LIMIT_S)
        if isinstance(result, BaseException):
            raise result
        return result

    def run_plan(self, plan: StepPlan) -> StepResult:
        """One step, alone."""
        self.engine.submit(plan, self.epoch)
        return self.result()

    def drive(
        self, scheduler: HandScheduler, depth: int = 2, on_result: Callable[[StepResult], None] | None = None
    ) -> None:
        """Run until every sequence has ended and every slot is free, with ``depth`` plans in flight."""
        in_flight = 0
        while True:
            while in_flight < depth and (plan := scheduler.plan()) is not None:
                self.engine.submit(plan, self.epoch)
                in_flight += 1
            if not in_flight:
                assert scheduler.done, "the scheduler is stuck"
                return
            result = self.result()
            in_flight -= 1
            scheduler.process(result)
            if on_result is not None:
                on_result(result)

    def synchronize(self) -> None:
        """Wait for the whole device, which nobody may while graphs are captured, by any engine of this process."""
        _await_graphs({*_OPEN, self})
        torch.cuda.synchronize()

    def close(self) -> None:
        _OPEN.discard(self)
        if not self.engine.stop():
            faulthandler.dump_traceback()  # says what its threads wait for
            raise AssertionError("the engine did not end in time")
