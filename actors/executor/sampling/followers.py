"""Who follows the grammar of which rows of a step, and what came of them.

Rows that verify drafts have several samples, a *run*: one mask behind the last token, and one behind each draft that
the grammar lets through. Behind an impossible draft any mask will do, since what is sampled in that draft's place is
another token, and nothing behind it counts.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.model.grammars.grammar import GrammarError
from pagebus.bus.messages import Int32Array

if TYPE_CHECKING:  # imported when the first grammar comes
    from llguidance import LLMatcher


@dataclass(slots=True, eq=False)
class Follower:
    """Follows one stay of a sequence in a slot. ``start``: what sequences of its grammar begin with in its ``lane``.
    ``output``: its tokens so far. ``drafts``: those that its next step may verify. ``over``: there is nothing left to
    follow. ``broken``: because that was not possible any further."""

    lane: int
    start: Future[LLMatcher]
    output: list[int]
    drafts: list[int] = field(default_factory=list)
    matcher: LLMatcher | None = None
    over: bool = False
    broken: bool = False

    def begin(self) -> None:
        """Go on behind the tokens that there are; waits until the grammar is ready."""
        try:
            self.matcher = self.start.result().deep_copy()
        except GrammarError:
            self.broken = True
        else:
            self.matcher.consume_tokens(self.output)

    def stop(self) -> None:
        """There is nothing left to follow."""
        self.over = True

    def give_up(self) -> None:
        """It cannot be followed any further."""
        self.broken = True

    def find_break(self, drafts: list[int], masks: torch.Tensor) -> int | None:
        """The matcher has failed at one of the masks [., ceil(V / 32)] before and behind ``drafts``: behind how many of
        them, None if it does not fail again. Masks before that one are filled once more. The matcher begins anew, as
        the draft may turn out to be wrong."""
        failed = None
        self.begin()
        for place in range(1 + len(drafts)):
            matcher, mask = self.matcher, masks[place]
            assert matcher is not None
            matcher.unsafe_compute_mask_ptr(mask.data_ptr(), 4 * len(mask))
            if matcher.is_error():
                failed = place
                break
            if not matcher.try_consume_tokens(drafts[place : place + 1]):
                break  # it is impossible, or the last
        self.begin()
        return failed


@dataclass(frozen=True, slots=True)
class ConstrainedRuns:
    """The runs of a step that follow a grammar [F], each with its follower: their ``numbers`` among the runs of the
    step, their first samples (``rows``), how many they have, and where the first mask of each lies. ``order``: of them,
    lane by lane, so that threads seldom meet in one."""

    work: StepWork | None
    rows: list[int]
    widths: list[int]
    places: list[int]
    numbers: list[int]
    followers: list[Follower]
    order: list[int]

    @classmethod
    def none(cls) -> ConstrainedRuns:
        """Of no step."""
        return cls(None, [], [], [], [], [], [])

    @classmethod
    def of(cls, work: StepWork, by_slot: dict[int, Follower], before: ConstrainedRuns) -> ConstrainedRuns:
        """Of a step, perhaps with the same followers as in the one ``before``."""
        rows, runs = work.constrained, work.runs
        widths, numbers = [1] * len(rows), rows.tolist()
        if runs is not None:
            starts = runs.starts[:-1]
            own = np.searchsorted(rows, starts)
            chosen = np.flatnonzero(rows.take(own, mode="clip") == starts)
            rows, numbers = starts[chosen], chosen.tolist()
            widths = np.diff(runs.starts)[chosen].tolist()
        places = np.cumsum([0, *widths[:-1]]).tolist()
        followers = [by_slot[slot] for slot in work.sample_slots[rows].tolist()]
        order = before.order
        if followers != before.followers:
            order = sorted(range(len(followers)), key=lambda place: followers[place].lane)
        return cls(work, rows.tolist(), widths, places, numbers, followers, order)

    def take_guesses(self) -> None:
        """Tell the followers of what a head has guessed for this step, if one has; waits for it."""
        if self.work is None or self.work.runs is None or self.work.runs.guessed is None:
            return
        drafts = self.work.runs.guessed()
        for number, follower in zip(self.numbers, self.followers, strict=True):
            follower.drafts = drafts[number].tolist()

    def tokens(self, told: Int32Array) -> list[list[int]]:
        """The tokens that count of each run, by what the device has told of the step; the followers are told of the
        drafts behind them."""
        assert self.work is not None
        runs, count = self.work.runs, len(self.work.positions)
        if runs is None:
            for follower in self.followers:
                follower.drafts = []
            return [[token] for token in told[self.rows].tolist()]
        tokens, about = told[:count].tolist(), told[count:]
        counts, found = about[: len(runs)].tolist(), about[2 * len(runs) : 3 * len(runs)].tolist()
        drafts = runs.drafts(about)
        for number, follower in zip(self.numbers, self.followers, strict=True):
            follower.drafts = drafts[number, : found[number]].tolist()
        return [tokens[row : row + counts[number]] for row, number in zip(self.rows, self.numbers, strict=True)]
