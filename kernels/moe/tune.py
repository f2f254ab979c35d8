"""Finds launch shapes of a model's experts by timing the cost model's best few: part of ``pagebus tune``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import Tuned, read_user_tables, user_path
from pagebus.kernels.linear.tuning.timing import Compilers
from pagebus.kernels.linear.tuning.tune import GAIN, Tell
from pagebus.kernels.moe.choice import candidates_for, choose
from pagebus.kernels.moe.launch.rule import by_rule
from pagebus.kernels.moe.launch.shapes import Config, Shape, buckets
from pagebus.kernels.moe.launch.tables import merge_table
from pagebus.kernels.moe.timing import ExpertsBench, ExpertsJob

BEST = 6
"""Launch shapes that are timed for a bucket, besides what is chosen now and the rule's."""
FIRST = (1, 32, 256, 4096, 8, 64, 1024, 128, 2048, 8192, 512, 16, 4, 2)
"""Buckets, the most telling first: time may end before all are done."""


class TimedExperts(NamedTuple):
    """What was found for a bucket: microseconds of a layer before and after."""

    shape: Shape
    bucket: int
    before: float
    after: float
    config: Config
    changed: bool


class Timer:
    """Times launch shapes of one kind of experts."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._bench: ExpertsBench | None = None

    def times(self, shape: Shape, bucket: int, configs: Iterable[Config]) -> dict[Config, float]:
        """Microseconds of each launch shape that this GPU takes."""
        if self._bench is None or self._bench.shape != shape:
            self._bench = None  # its memory first
            self._bench = ExpertsBench(shape)
        found: dict[Config, float] = {}
        for config in configs:
            try:
                found[config] = self._bench.microseconds(config, bucket)
            except Exception as error:
                self._tell(f"experts {shape.name} {bucket} {config}: {str(error)[:100]}")
        return found


def tune_experts(
    shape: Shape, target: Target, folder: Path, minutes: float, tell: Tell, compilers: Compilers,
    clock: Callable[[], float] = time.monotonic, timer: Timer | None = None, above: int = 0,
) -> list[TimedExperts]:  # fmt: skip
    """Time the best few of each bucket ``above`` this many tokens, and write the user's table in ``folder`` bucket by
    bucket."""
    end_s, found = clock() + 60 * minutes, []
    timer = timer or Timer(tell)
    read_user_tables(folder)
    for bucket in (bucket for bucket in order(shape) if bucket > above):
        if clock() >= end_s:
            tell(f"time of experts is over: {bucket} tokens and what comes behind keep their choices")
            break
        configs = considered(shape, bucket, target)
        for failure in compilers.compile(ExpertsJob(shape, config) for config in configs):
            tell(failure)
        found.append(_tune_bucket(shape, bucket, target, folder, timer, configs))
        tell(_line(found[-1]))
    return found


def order(shape: Shape) -> list[int]:
    """All buckets of such experts, the most telling first."""
    known = buckets(shape)
    return list(dict.fromkeys((*(bucket for bucket in FIRST if bucket in known), *known)))


def considered(shape: Shape, bucket: int, target: Target) -> list[Config]:
    """What is timed, what is chosen now first."""
    given = choose(bucket, shape, torch.bfloat16, target), by_rule(bucket, shape, torch.bfloat16, target)
    best = (each.config for each in candidates_for(bucket, shape, target, BEST))
    return list(dict.fromkeys((*given, *best)))


def _tune_bucket(
    shape: Shape, bucket: int, target: Target, folder: Path, timer: Timer, configs: list[Config]
) -> TimedExperts:  # fmt: skip
    """Keep what is chosen, unless something else is clearly faster."""
    current, times = configs[0], timer.times(shape, bucket, configs)
    if not times:
        return TimedExperts(shape, bucket, 0.0, 0.0, current, changed=False)
    best = min(times, key=lambda config: times[config])
    changed = current not in times or times[best] <= GAIN * times[current]
    chosen = best if changed else current
    merge_table(user_path(target, folder, Tuned.EXPERTS), shape, {bucket: chosen})
    return TimedExperts(shape, bucket, times.get(current, times[best]), times[chosen], chosen, changed)


def _line(found: TimedExperts) -> str:
    head = f"{f'experts {found.shape.name}':24} {found.bucket:>4} tokens"
    if not found.after:
        return f"{head}: no time, as this GPU takes none of the launch shapes"
    saved = f"{1 - found.after / found.before:.0%} less" if found.changed else "kept"
    times = f"{found.before:>8.2f} → {found.after:>8.2f} µs"
    return f"{head} {times}, {saved}: {found.config}"
