"""Tunes a model within its decode steps: bucket by bucket, the most telling first, until the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from pagebus.actors.executor.tuning.changes import Choices, Measurable, changes
from pagebus.actors.executor.tuning.compiler import StepCompiler, Wanted
from pagebus.actors.executor.tuning.decode_step import DecodeStep
from pagebus.actors.executor.tuning.selection import Comparer, Kept, select
from pagebus.actors.executor.tuning.short_model import shortened
from pagebus.actors.executor.tuning.step_timer import LONGEST, StepTimer
from pagebus.actors.executor.tuning.tables import ModelTables, scratch_tables
from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.shapes import BUCKETS
from pagebus.kernels.linear.tuning.tune import ORDER, Tell

SHARE_OF_CACHE = 8
"""One part in this many of the free memory holds keys and values; rows share blocks where that is not enough."""


class TunedStep(NamedTuple):
    """Milliseconds of a step of ``bucket`` rows of the short model, before and after."""

    bucket: int
    before: float
    after: float

    @property
    def changed(self) -> bool:
        """Whether any launch shape is another."""
        return self.after < self.before


class Compiler(Protocol):
    """Compiles ahead: see :class:`StepCompiler`."""

    def begin(self, rows: int, choices: Sequence[Choices]) -> None: ...

    def wait(self) -> None: ...


class Tools(NamedTuple):
    """What tuning needs: what times a step with a number of rows, and what compiles."""

    timer: Callable[[int], Comparer]
    compiler: Compiler


def tune_steps(
    wanted: Wanted, todo: Measurable, target: Target, folder: Path, minutes: float, tell: Tell,
    tokens: Sequence[int] = BUCKETS, clock: Callable[[], float] = time.monotonic,
) -> list[TunedStep]:  # fmt: skip
    """Tune steps of ``tokens`` decodes on the GPU here, and write the user's tables in ``folder`` bucket by bucket."""
    end_s = clock() + 60 * minutes
    short = wanted._replace(config=shortened(wanted.config))
    tell(f"in steps of {short.config.num_layers} of {wanted.config.num_layers} layers")
    with StepCompiler(short, todo, target) as compiler, scratch_tables(target, todo) as tables:
        step = _step(short, max(tokens))
        tools = Tools(lambda rows: StepTimer(step, tables, rows, tell), compiler)
        return tune_buckets(tools, todo, target, ModelTables(folder, target, todo), tell, tokens, end_s, clock)


def tune_buckets(
    tools: Tools, todo: Measurable, target: Target, tables: ModelTables, tell: Tell, tokens: Sequence[int],
    end_s: float, clock: Callable[[], float],
) -> list[TunedStep]:  # fmt: skip
    """The same with these tools; ``tables`` are the user's. Nothing begins after ``end_s``."""
    order = [bucket for bucket in ORDER if bucket in tokens]
    tried = {bucket: changes(todo, bucket, target) for bucket in order}
    found: list[TunedStep] = []
    for place, bucket in enumerate(order):
        if clock() >= end_s:
            tell(f"time is over: {bucket} tokens and what comes behind keep their choices")
            break
        for following in order[:2] if not place else order[place + 1 : place + 2]:
            for group in tried[following]:
                tools.compiler.begin(following, [change.choices for change in group])
        kept = select(tried[bucket], tools.timer(bucket), lambda: clock() < end_s, tools.compiler.wait)
        if kept.before:
            tables.put(bucket, kept.choices)
        found.append(TunedStep(bucket, kept.before, kept.after))
        for line in _lines(bucket, kept):
            tell(line)
    return found


def _step(wanted: Wanted, most: int) -> DecodeStep:
    """The step on the GPU, for up to ``most`` rows."""
    device = torch.device("cuda", torch.cuda.current_device())
    config, size = wanted.config, wanted.cache_dtype.itemsize
    room = torch.cuda.mem_get_info(device)[0] // SHARE_OF_CACHE // (config.spec.kv_numbers() * size)
    return wanted.on(device, most, min(most * (LONGEST + 16), room))


def _lines(bucket: int, kept: Kept) -> list[str]:
    ending = "" if kept.done else "; not all were tried, as time is over"
    if not kept.before:
        return [f"{bucket:>4} tokens: no time was measured"]
    if not kept.choices:
        return [f"{bucket:>4} tokens {kept.before:.3f} ms, nothing is faster{ending}"]
    saved = 1 - kept.after / kept.before
    head = f"{bucket:>4} tokens {kept.before:.3f} → {kept.after:.3f} ms, {saved:.1%} less{ending}"
    configs = [f"       {each.name:24} {config or 'library'}" for each, config in kept.choices.items()]
    return [head, *(f"       {name:24} saved {share:.1%} of the step" for name, share in kept.changed), *configs]
