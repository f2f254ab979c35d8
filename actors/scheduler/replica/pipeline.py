"""Pipeline depth: the number of plans that a replica gets before their results are known. With pipeline stages, also
the rows that the next plan may have.

With stages, a sequence's next token needs its newest, which the first stage has only when the step that samples it has
passed all stages. So decodes are divided into *lanes*, as many as there are stages: while one lane is in the last
stage, the others are in those before it. No sequence belongs to a lane for good: each step takes its share of the
sequences that are not in flight, the longest waiting first. If they get no blocks and nothing is in flight, the step is
open to any sequence. Chunks of prompts need no sampled token, and follow each other.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.replica.slots import SlotTable
from pagebus.bus.messages import Int32Array

LEAST_DEPTH = 2
"""Enough while a step lasts longer than a plan takes to follow a result."""
AHEAD_S = 0.0025
"""How long the plans behind the running step should last. It exceeds the time from a result to the plan that it allows,
over the bus and through the scheduler: measured, usually 1.1 ms, and 2 ms in one of a hundred cases."""
NEWEST_SHARE = 0.25
"""Weight of the newest step of a kind in the average duration of that kind."""
IDLE, DECODES, PROMPTS = range(3)
"""Kinds of steps: without rows, decodes only, with prompts."""


class Pipeline:
    """The pipeline of one replica: two plans, and up to ``most`` while steps are short (``--pipeline-depth``).

    A step is expected to last as long as recent ones of its kind. So short steps after a long prompt are planned ahead
    too: they will follow each other quickly.

    With ``stages``, each stage has a plan, and one more is ready for the first.
    """

    def __init__(self, most: int, stages: int = 1) -> None:
        self._least = LEAST_DEPTH if stages == 1 else stages + 1
        self.most = most if stages == 1 else max(most, self._least)
        self._in_flight: deque[tuple[int, int]] = deque()
        """The kind of each plan, and how many tokens it computes."""
        self._step_s = [0.0, math.inf, math.inf]
        self._last_done_s = 0.0

    def __len__(self) -> int:
        """Plans in flight."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether one more plan is wanted."""
        depth = len(self)
        if depth < self._least:
            return depth < self.most
        return depth < self.most and sum(self._step_s[kind] for kind, _ in islice(self._in_flight, 1, None)) < AHEAD_S

    @property
    def has_room_for_orders(self) -> bool:
        """Whether there may be one more plan without rows, which takes no time."""
        return len(self) < self.most

    @property
    def decode_s(self) -> float:
        """How long a step of decodes takes; infinite if there was none."""
        return self._step_s[DECODES]

    @property
    def num_tokens(self) -> int:
        """Tokens in flight that are still to be computed; the running step is taken to be half done."""
        tokens = [count for _, count in self._in_flight]
        return sum(tokens) - tokens[0] // 2 if tokens else 0

    def planned(self, num_rows: int, num_decodes: int, num_tokens: int) -> None:
        """Count one more plan in flight."""
        kind = IDLE if not num_rows else DECODES if num_rows == num_decodes else PROMPTS
        self._in_flight.append((kind, num_tokens))

    def done(self, launched_s: float, done_s: float) -> None:
        """The oldest step in flight was launched and done at these times of its executor's clock."""
        (kind, _), seconds = self._in_flight.popleft(), done_s - max(launched_s, self._last_done_s)
        self._last_done_s = done_s
        if kind != IDLE:
            before_s = self._step_s[kind]
            known = math.isfinite(before_s)
            self._step_s[kind] = before_s + NEWEST_SHARE * (seconds - before_s) if known else seconds


def hold_back(table: SlotTable, behind: Int32Array, stages: int, num_in_flight: int) -> Int32Array:
    """``behind`` [slots] without the rows that the next step must not have: those whose newest token is in flight, and
    decodes beyond the step's share. While ``num_in_flight`` steps keep all stages busy, a step without prompts has no
    decodes either: they gather to a full share meanwhile."""
    known: NDArray[np.bool_] = table.known == table.total
    behind = np.where(known, behind, 0)
    decodes = np.flatnonzero(behind == 1)
    if not len(decodes):
        return behind
    if num_in_flight >= stages and not np.count_nonzero(behind > 1):
        behind[decodes] = 0
        return behind
    num_running = len(decodes) + len(table) - np.count_nonzero(known & (table.ids != 0))
    share = -(-num_running // stages)
    if len(decodes) > share:
        longest = np.argsort(table.planned[decodes], kind="stable")
        behind[decodes[longest[share:]]] = 0
    return behind
