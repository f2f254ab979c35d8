"""The oracle with drafts: right, wrong, and right as far as some place."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.bus.messages import StepPlan
from tests.dst.engine import Machine, Oracle, Row, chain


def with_drafts(machine: Machine, rng: random.Random) -> Machine:
    """The machine, in a third of the cases with executors that speculate."""
    if rng.random() < 2 / 3:
        return machine
    return replace(machine, num_drafts=rng.choice((1, 3, 6)), oracle=partial(DraftingOracle, machine.accepted))


class DraftingOracle(Oracle):
    """What rejected drafts have written stays in the cache. How many of each run are right is noted in ``accepted``."""

    def __init__(self, accepted: list[int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._accepted = accepted

    def run(self, plan: StepPlan, work: StepWork) -> np.ndarray:
        """What the device tells of a step: tokens; by run how many count, the first's index, and how many drafts stand
        behind it; and those drafts, where a grammar has to know them."""
        if work.runs is None:  # a step that looks for no drafts
            for slot in plan.slots.tolist():
                self.rows[slot].drafts = []
            return super().run(plan, work)
        self._move(plan)
        for new in plan.new_sequences:
            self.rows[new.slot].drafts = []
        bounds, verified = len(plan.latest_starts), {}
        for place, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True)):
            row = self.rows[slot]
            start = int(work.starts[place]) if place >= bounds else len(row.tokens) - 1
            verified[slot] = row.drafts[: count - 1] if place < bounds else []
            known = len(row.tokens)
            row.tokens += (verified[slot] + [0] * count)[: count - 1] if place < bounds else []
            self._write(row, start, start + count)
            del row.tokens[known:]
        allowed = self.constrained.allowed(work)
        sampled = np.zeros(len(work.positions), np.int32)
        told: list[tuple[int, int, int]] = []
        for first in work.runs.starts[:-1].tolist():
            slot = int(work.sample_slots[first])
            masks = [allowed.get(first + place) for place in range(len(verified[slot]) + 1)]
            told.append(self._verify(self.rows[slot], verified[slot], sampled[first:], masks))
        columns = np.array(told, np.int32).reshape(-1, 3).T.reshape(-1)
        results = np.concatenate([sampled, columns, *self._told_drafts(work)])
        self.constrained.sampled(work, results)
        return results

    def _told_drafts(self, work: StepWork) -> list[np.ndarray]:
        """Of each run, those that stand behind it and what does not matter."""
        assert work.runs is not None
        slots = work.sample_slots[work.runs.starts[:-1]].tolist() if work.runs.told_drafts else []
        padding = [0] * work.runs.told_drafts
        return [np.array((self.rows[slot].drafts + padding)[: len(padding)], np.int32) for slot in slots]

    def _verify(
        self, row: Row, drafts: list[int], sampled: np.ndarray, masks: list[np.ndarray | None]
    ) -> tuple[int, int, int]:
        """One run, its tokens at the beginning of ``sampled``; ``masks``: the ids that each may be, None: any."""
        index, count = len(row.tokens) - row.new.num_prompt_tokens, 0
        while True:
            sampled[count] = self._sample(row, masks[count])
            count += 1
            if count > len(drafts) or drafts[count - 1] != sampled[count - 1]:
                break
        self._accepted.append(count - 1)
        row.drafts = self._draft(row)
        return count, index, len(row.drafts)

    def _draft(self, row: Row) -> list[int]:
        ahead, most = replace(row, tokens=list(row.tokens)), self.limits.num_drafts
        pattern = chain(len(row.tokens), row.new.sequence_id) >> 20
        for place in range(pattern % (most + 1)):
            token = ahead.next_token(self.limits.vocab_size, None)
            right = place < pattern // 16 % (most + 2)
            ahead.tokens.append(token if right else (token + 1) % self.limits.vocab_size)
        return ahead.tokens[len(row.tokens) :]
