"""Paces prefill beside decodes, so that streams stay smooth (``--itl-target-ms``).

A step with decodes is filled with prefill until its predicted time reaches the inter-token target. If a request would
get its first token later than ``--ttft-target-ms`` at that pace, the step may take nearly twice the target. Steps
without decodes are as large as the token budget allows, because only their own sequences wait for them.

While little is waiting, prompts are computed one after the other, in short steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from pagebus.actors.scheduler.replica.step_time import FORGET, StepTime, Work
from pagebus.actors.scheduler.request import Sequence
from pagebus.bus.messages import Int32Array

LEAST_CHUNK_TOKENS = 32
"""Prefill goes on with at least this in every step, also where decodes alone take longer than the target."""
CHUNK_UNIT_TOKENS = 16
PRESSED = 1.75
"""Share of the target that a step may take while a first token is late."""
GROWTH = 1.5
"""The most that a chunk may exceed the largest one tried recently: the law is not extrapolated far."""
FIRST_SHARE = 1 / 3
"""If prompts were timed at startup, a chunk that takes this share of the target at that rate counts as tried, so the
first chunks take half of it. Otherwise chunks begin small, and many first tokens wait meanwhile."""
FREE_TOKENS = 160
"""Up to this many tokens, a step's products take as long as reading the weights, which decodes alone wait for too. So
prompts cost little more than their attention. (By the rates of an H200, arithmetic takes as long at 166.)"""
HURRY_STEPS = 2
"""Steps are full if more waits than this many full steps hold, or a prompt has waited for the time of this many."""
DEVIATIONS = 2.0
"""The usual deviations that a planned step stays below its time limit."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A row that could compute ``wanted`` > 1 tokens after ``start`` others. ``arrived_s``: its request's time of
    arrival while that waits for the first token."""

    start: int
    wanted: int
    arrived_s: float | None = None


def prefill_of(sequence: Sequence, start: int, wanted: int) -> Prefill:
    """The row of a running sequence."""
    return Prefill(start, wanted, None if sequence.produced else sequence.request.arrived_s)


def _work(starts: Int32Array, counts: Int32Array, num_decodes: int, num_drafts: int) -> Work:
    chunks = counts[num_decodes:].astype(np.float64)
    return Work(
        decodes=num_decodes,
        decode_context=int(starts[:num_decodes].sum()),
        prefill=int(chunks.sum()),
        pairs=float((chunks * (starts[num_decodes:] + chunks / 2)).sum()),
        drafts=num_drafts,
    )


class Pacer:
    """The pace of one replica. ``itl_s`` > 0 and ``ttft_s`` are the targets in seconds; ``ttft_s`` None: none.
    ``tokens_per_s``: the rate of prompts measured at startup, 0 if not measured."""

    def __init__(self, itl_s: float, ttft_s: float | None, tokens_per_s: float = 0.0) -> None:
        self.law = StepTime()
        self._first = self._floor = self.tried = tokens_per_s * itl_s * FIRST_SHARE
        """Tokens of prefill beside decodes that have recently kept the target."""
        self._itl_s = itl_s
        self._in_flight: deque[Work] = deque()
        self._last_done_s = 0.0
        self._ttft_s = ttft_s

    def share(self, now_s: float, decodes: Work, rows: Ordered[Prefill], budget: int) -> list[int]:
        """Tokens for each of ``rows``, best first, in a step with these ``decodes`` (at least one) and no more than
        ``budget`` tokens of prefill. Rows at the end may get none."""
        counts = self._fill(self._itl_s, decodes, rows, budget)
        if self._ttft_s is not None and self._is_late(now_s, self._ttft_s, rows, sum(counts)):
            return self._fill(self._itl_s * PRESSED, decodes, rows, budget)
        return self._one_by_one(now_s, decodes, rows, counts)

    def _one_by_one(self, now_s: float, decodes: Work, rows: Ordered[Prefill], counts: list[int]) -> list[int]:
        """``counts``, or if there is no hurry and the first row is nearly free beside the decodes, only those of the
        rows that are nearly free. Computed all at once, they would get their first tokens at the end of one long step,
        and stay in step with each other from then on."""
        spare = FREE_TOKENS - decodes.decodes
        if rows[0].wanted > spare or sum(row.wanted for row in rows) > HURRY_STEPS * sum(counts):
            return counts
        for number, row in enumerate(rows):
            spare -= row.wanted
            waited_s = math.inf if row.arrived_s is None else now_s - row.arrived_s
            if spare < 0 and waited_s < HURRY_STEPS * self._itl_s:
                return counts[:number] + [0] * (len(counts) - number)
        return counts

    def allows(self, decodes: Work) -> bool:
        """Whether a step with these decodes alone keeps the target."""
        return self.law.predict_s(decodes) * (1 + DEVIATIONS * self.law.deviation(decodes)) <= self._itl_s

    def has_time(self, starts: Int32Array, counts: Int32Array, drafts: Int32Array) -> bool:
        """Whether a step of rows as in :meth:`planned` is expected to keep the target with these ``drafts`` [decodes].
        Prompts were given less than fits: what was left for deviations is enough for a few."""
        return self.law.predict_s(_work(starts, counts, len(drafts), int(drafts.sum()))) <= self._itl_s

    def planned(self, starts: Int32Array, counts: Int32Array, num_decodes: int, num_drafts: int = 0) -> None:
        """Note a planned step of rows with ``counts`` tokens after ``starts`` others each [rows], decodes first, which
        have ``num_drafts`` besides. :meth:`done` brings its time, in order."""
        self._in_flight.append(_work(starts, counts, num_decodes, num_drafts))

    def done(self, launched_s: float, done_s: float) -> None:
        """The next planned step was launched and done at these times of its executor's clock. While the step before it
        ran, it waited; only the rest is its own time."""
        work = self._in_flight.popleft()
        time_s = done_s - max(launched_s, self._last_done_s)
        self._last_done_s = done_s
        if work.decodes or work.prefill:
            self.law.learn(work, time_s)
        if work.decodes and work.prefill:
            self._try(work.prefill, time_s)

    def _try(self, prefill: int, time_s: float) -> None:
        """Learn how much prefill keeps the target, whatever the law predicts. Steps without decodes teach nothing:
        other code runs them, with the largest chunks. The size allowed for first chunks is not forgotten while prompts
        are short; only a step that was too long lowers it."""
        if time_s <= self._itl_s:
            self._floor = min(self._first, self._floor / FORGET)
            self.tried = max(self.tried * FORGET, prefill, self._floor)
        else:
            self.tried = min(self.tried, prefill * self._itl_s / time_s)
            self._floor = min(self._floor, self.tried)

    def _is_late(self, now_s: float, ttft_s: float, rows: Ordered[Prefill], pace: int) -> bool:
        """Whether at ``pace`` tokens per step, of the target's time each, a first token would come too late."""
        ahead = 0
        for row in rows:
            ahead += row.wanted
            if row.arrived_s is None:
                continue
            if now_s - row.arrived_s + ahead / max(1, pace) * self._itl_s > ttft_s:
                return True
        return False

    def _fill(self, time_s: float, decodes: Work, rows: Ordered[Prefill], budget: int) -> list[int]:
        law = self.law
        grown = int(self.tried * GROWTH) // CHUNK_UNIT_TOKENS * CHUNK_UNIT_TOKENS
        most = min(budget, max(LEAST_CHUNK_TOKENS, grown))
        least = min(budget, LEAST_CHUNK_TOKENS)
        begun = Work(decodes.decodes, decodes.decode_context, prefill=1)
        spare_s = time_s / (1 + DEVIATIONS * law.deviation(begun)) - law.predict_s(begun)
        counts, taken = [], 0
        for row in rows:
            fitting = int(min(law.prefill_in(max(0.0, spare_s), row.start), row.wanted))
            if fitting < row.wanted:
                fitting -= fitting % CHUNK_UNIT_TOKENS
            count = min(max(fitting, least - taken), row.wanted, most - taken)
            spare_s -= law.prefill_s(row.start, count)
            counts.append(count)
            taken += count
            if count < row.wanted:
                break
        return counts + [0] * (len(rows) - len(counts))
