"""Times a decode step with other launch shapes against the same step without them, replay by replay."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch

from pagebus.actors.executor.tuning.changes import Choices
from pagebus.actors.executor.tuning.decode_step import DecodeStep
from pagebus.actors.executor.tuning.selection import Comparison
from pagebus.actors.executor.tuning.tables import ModelTables

SHORTEST, LONGEST = 128, 1920
"""Tokens of rows, spread evenly: rows of one length, or short ones alone, may suit a form of attention by chance."""
WARM, QUICK_MS, THOROUGH_MS, LEAST, MOST = 2, 25.0, 100.0, 8, 60
"""Pairs of replays before those that count; how long those of a comparison take, and how many there are."""
KEPT_GRAPHS = 3


class StepTimer:
    """Steps of ``rows`` decodes, which choose by ``tables``."""

    def __init__(self, step: DecodeStep, tables: ModelTables, rows: int, tell: Callable[[str], None]) -> None:
        self._step, self._tables, self._rows, self._tell = step, tables, rows, tell
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._whole_ms = 0.0

    def key(self, choices: Choices) -> object:
        """What the step runs: each product's kernel, form and launch shape."""
        self._tables.put(self._rows, choices)
        chooser = self._step.runner.chooser
        found, attention = chooser.products(self._rows, self._rows), chooser.decode_form(self._rows)
        products = ((name, each.kernel, each.form, each.config) for name, each in found.items())
        return attention and attention.form, *products

    def compare(self, before: Choices, after: Choices, *, thoroughly: bool) -> Comparison | None:
        """Median times of alternating replays; None if the step cannot be launched with what is chosen ``after``."""
        try:
            graphs = self._graph(before), self._graph(after)
            if not self._whole_ms:
                self._whole_ms = statistics.mean(replay_pairs(*graphs, LEAST)[0])
            pairs = int((THOROUGH_MS if thoroughly else QUICK_MS) / self._whole_ms / 2)
            return compared(*replay_pairs(*graphs, max(LEAST, min(MOST, pairs))))
        except Exception as error:
            self._tell(f"{self._rows} tokens: {_told(before, after)}: {str(error)[:200]}")
            return None

    def _graph(self, choices: Choices) -> torch.cuda.CUDAGraph:
        """Of the step with these choices; the latest few are kept."""
        key = self.key(choices)
        if key in self._graphs:
            self._graphs[key] = self._graphs.pop(key)
            return self._graphs[key]
        while len(self._graphs) >= KEPT_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = self._step.capture(self._rows, lengths(self._rows))
        return self._graphs[key]


def lengths(rows: int) -> list[int]:
    """Of each row."""
    return [SHORTEST + (LONGEST - SHORTEST) * (2 * row + 1) // (2 * rows) for row in range(rows)]


def _told(before: Choices, after: Choices) -> str:
    changed = {each: config for each, config in after.items() if each not in before or before[each] != config}
    return ", ".join(f"{each.name} {config or 'library'}" for each, config in changed.items()) or "today's choices"


def replay_pairs(
    before: torch.cuda.CUDAGraph, after: torch.cuda.CUDAGraph, count: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of ``count`` alternating replays of each, queued one behind the other: from the end of the last."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (WARM + count))]
    for index, end in enumerate(ends):
        (after if index % 2 else before).replay()
        end.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(ends[2 * WARM - 1 :])]
    return times[::2], times[1::2]


def compared(before: list[float], after: list[float]) -> Comparison:
    """Medians, and the standard error of the mean of what a pair saves, without its outliers."""
    saved = sorted(a - b for a, b in zip(before, after, strict=True))
    quarter = len(saved) // 4
    spread = (saved[-1 - quarter] - saved[quarter]) / 1.349  # of a normal distribution: a standard deviation
    return Comparison(statistics.median(before), statistics.median(after), 1.253 * spread / len(saved) ** 0.5)
