"""A modelled executor that speculates: each draft is right with the same chance, whatever the sequence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.actors.simulator.executor import ModelExecutor
from pagebus.actors.simulator.profile import Profile
from pagebus.bus.messages import END_LENGTH, END_NONE, END_STOP, Int32Array, StepPlan


class DraftingExecutor(ModelExecutor):
    """Every sequence always has drafts. A step that verifies some takes as long as the profile says of as many tokens,
    and reads the keys and values of a row once.

    Args:
        acceptance: the chance of a draft to be right, if those before it are.
    """

    def __init__(
        self, joined: ReplicaJoined, profile: Profile, output_tokens: Callable[[int], int], acceptance: float
    ) -> None:
        super().__init__(joined, profile, output_tokens)
        self._acceptance = acceptance
        self._rng = np.random.default_rng(joined.epoch)
        self._accepted = np.zeros(joined.max_num_seqs, np.int32)
        """By slot: of the drafts that the step verifies."""

    def _compute(self, plan: StepPlan) -> tuple[float, NDArray[np.intp], int]:
        slots, counts, count = plan.slots.astype(np.intp), plan.num_scheduled, len(plan.latest_starts)
        drafts = counts[:count] - 1
        right = self._rng.random((count, self.joined.num_drafts)) < self._acceptance
        accepted = np.minimum(right.cumprod(axis=1).sum(axis=1), drafts).astype(np.int32)
        self._accepted[slots] = 0
        self._accepted[slots[:count]] = accepted
        before = self._computed[slots]
        self._computed[slots] = before + counts
        self._computed[slots[:count]] = before[:count] + 1 + accepted
        num_tokens = int(counts.sum())
        sampled = slots[self._computed[slots] - self._accepted[slots] == self._total[slots]]
        if count < len(slots):
            return self._mixed_s(plan, before + counts, num_tokens), sampled, num_tokens
        seconds = self._base_s[num_tokens] + self._read_tokens(before + counts) * self._kv_token_s
        if num_tokens > self._graph_tokens:
            seconds = max(seconds, self._eager_floor_s)
        return seconds, sampled, num_tokens

    def _sample(self, slots: NDArray[np.intp]) -> tuple[Int32Array, Int32Array, Int32Array]:
        """As of any executor, in runs: a sequence ends within one."""
        total, stop = self._total[slots], self._stop[slots]
        self._total[slots] = total + 1 + self._accepted[slots]
        lengths = np.clip(stop - total, 0, 1 + self._accepted[slots])
        places = np.arange(int(lengths.sum()), dtype=np.int32) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        indexes = (np.repeat(total - self._prompt[slots], lengths) + places).astype(np.int32)
        over = np.repeat(total, lengths) + places + 1 >= np.repeat(stop, lengths)
        how = np.where(stop >= self._limit[slots], END_LENGTH, END_STOP)
        ends = np.where(over, np.repeat(how, lengths), END_NONE).astype(np.int32)
        return np.repeat(self._ids[slots], lengths), indexes, ends
