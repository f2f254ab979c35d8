"""The recent demand on a deployment: rates of long prompts, running streams, and how long decode steps take."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.replica.step_time import StepTime, Work
from pagebus.bus.messages import StepPlan, StepResult

WINDOW_S = 5.0
"""The time constant of the averages: their weights fall by a factor of e in it."""
NEWEST = 3
"""Looks in the short average, which shows early that prompts become more or fewer."""
EVERY_STEPS = 8
"""One of this many steps of a replica is timed; timing all would take the scheduler too long."""


@dataclass(slots=True)
class Demand:
    """``prompt_tokens`` and ``prompts``: uncached tokens and number of long prompts admitted per second;
    ``newest_tokens`` and ``newest_prompts``: the same at each of the last few looks. ``streams``: running sequences
    that have had a token, with ``context`` computed tokens in all. ``law``: the time of steps of decodes alone."""

    prompt_tokens: float = 0.0
    newest_tokens: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    newest_prompts: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    prompts: float = 0.0
    streams: float = 0.0
    context: float = 0.0
    law: StepTime = field(default_factory=StepTime)
    _admitted: list[int] = field(default_factory=list)
    _looked_s: float | None = None
    _timed: dict[str, tuple[int, Work]] = field(default_factory=dict)

    def admitted(self, num_tokens: int) -> None:
        """Count a long prompt, of which this many tokens are to be computed."""
        self._admitted.append(num_tokens)

    def look(self, replicas: list[Replica], now_s: float) -> bool:
        """Update the averages. False the first time, when there is no interval yet."""
        before_s, self._looked_s = self._looked_s, now_s
        admitted, self._admitted = self._admitted, []
        if before_s is None or now_s <= before_s:
            return False
        weight = -math.expm1((before_s - now_s) / WINDOW_S)
        streams, context = _running(replicas)
        self.newest_tokens.append(sum(admitted) / (now_s - before_s))
        self.prompt_tokens += weight * (self.newest_tokens[-1] - self.prompt_tokens)
        self.newest_prompts.append(len(admitted) / (now_s - before_s))
        self.prompts += weight * (self.newest_prompts[-1] - self.prompts)
        self.streams += weight * (streams - self.streams)
        self.context += weight * (context - self.context)
        return True

    def most_tokens(self) -> float:
        """``prompt_tokens``, or its short average if that is higher."""
        return max([self.prompt_tokens, *_mean(self.newest_tokens)])

    def least_prompts(self) -> float:
        """``prompts``, or its short average if that is lower."""
        return min([self.prompts, *_mean(self.newest_prompts)])

    def step_s(self, num_replicas: int) -> float:
        """How long a decode step takes if this many replicas share all streams; 0: unknown."""
        return self.law.predict_s(
            Work(decodes=round(self.streams / num_replicas), decode_context=round(self.context / num_replicas))
        )

    def planned(self, replica: Replica, plan: StepPlan) -> None:
        """Note a planned step if it is to be timed."""
        rows = len(plan.slots)
        if plan.step % EVERY_STEPS or not rows or plan.num_decodes < rows or len(plan.latest_starts):
            return
        context = int(replica.slots.computed[plan.slots].sum())
        self._timed[replica.name] = plan.step, Work(decodes=rows, decode_context=context)

    def done(self, name: str, result: StepResult) -> None:
        """Learn from the result of a step, if it was to be timed."""
        step, work = self._timed.get(name, (0, None))
        if work is not None and result.step == step:
            del self._timed[name]
            self.law.learn(work, result.busy_s)


def _mean(values: deque[float]) -> list[float]:
    """The mean as a list of one, empty without values."""
    return [sum(values) / len(values)] if values else []


def _running(replicas: list[Replica]) -> tuple[int, int]:
    """Sequences that have had their first token, and their tokens."""
    streams = context = 0
    for replica in replicas:
        table = replica.slots
        running = table.known > np.maximum(table.prompt, 1)
        streams += int(np.count_nonzero(running))
        context += int(table.computed[running].sum())
    return streams, context
