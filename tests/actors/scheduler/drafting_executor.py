"""A fake executor that speculates: its drafts are right, wrong, and right as far as some place, in a fixed pattern."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.bus.messages import END_LENGTH, END_NONE, END_STOP, StepPlan, StepResult
from tests.actors.scheduler.fake_executor import FakeExecutor, Slot
from tests.actors.scheduler.fake_model import VOCAB, candidates, next_token, remember


@dataclass
class DraftingExecutor(FakeExecutor):
    """``num_drafts``: the most of a row. What rejected drafts have written stays in the cache, as on a device."""

    num_drafts: int = 3
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """By slot: those behind its last token."""
    unknown: dict[int, bool] = field(default_factory=dict)
    """Slots whose rows may begin elsewhere than the host knows."""
    num_accepted: int = 0

    @property
    def joined(self) -> ReplicaJoined:
        return replace(super().joined, num_drafts=self.num_drafts)

    def _run(self, plan: StepPlan) -> StepResult:
        first, bounds = [new.slot for new in plan.new_sequences], len(plan.earliest_starts)
        for slot in first:
            self.drafts[slot], self.unknown[slot] = [], False
        assert bounds == len(plan.latest_starts)
        assert bounds >= plan.num_decodes or not bounds
        for row, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True)):
            state = self.slots[slot]
            if row < bounds:
                earliest, latest = int(plan.earliest_starts[row]), int(plan.latest_starts[row])
                assert earliest <= state.computed <= latest, f"slot {slot}: the plan does not know where it is"
                assert latest + count <= len(state.blocks) * self.block_size, "drafts beyond the blocks"
                assert latest + count < state.new.max_total_tokens, "drafts beyond the end"
                assert count <= 1 + self.num_drafts
                assert (count == 1) == (row < plan.num_decodes)
                self._lay_out(state, self.drafts[slot], count - 1)
                self.unknown[slot] = earliest < latest or count > 1
            elif row < plan.num_decodes:
                assert not self.unknown.get(slot), f"slot {slot}: nothing says where its row begins"
        return super()._run(plan)

    def _lay_out(self, state: Slot, drafts: list[int], count: int) -> None:
        """The tokens of the pass: behind the last one drafts, or whatever lies there."""
        assert state.computed + 1 == len(state.tokens)
        for token in (drafts + [VOCAB - 1] * count)[:count]:
            state.tokens.append(token)
            state.prefixes.append(remember(state.prefixes[-1], token))

    def _sample(self, plan: StepPlan) -> StepResult:
        rows: list[tuple[int, int, int, int, int]] = []
        tops: list[tuple[int, np.ndarray, np.ndarray]] = []
        looks = not plan.num_decodes or len(plan.latest_starts) > 0
        for slot, count in zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True):
            state = self.slots[slot]
            if state.computed < len(state.tokens):
                continue
            width = count if slot in plan.slots[: len(plan.earliest_starts)] else 1
            tokens = self._verify(state, self.drafts[slot][: width - 1], width - 1)
            self.drafts[slot] = self._draft(state) if looks else []
            self._report(state, tokens, rows, tops)
        return self._result(plan, rows, tops)

    def _verify(self, state: Slot, drafts: list[int], laid_out: int) -> list[int]:
        """Take what was laid out back, then the sampled tokens: as many as are drafts, and one more."""
        del state.tokens[len(state.tokens) - laid_out :], state.prefixes[len(state.prefixes) - laid_out :]
        found: list[int] = []
        while True:
            found.append(next_token(state.prefixes[-1]))
            state.tokens.append(found[-1])
            state.prefixes.append(remember(state.prefixes[-1], found[-1]))
            if len(found) > len(drafts) or drafts[len(found) - 1] != found[-1]:
                break
        self.num_accepted += len(found) - 1
        state.computed = len(state.tokens) - 1
        return found

    def _draft(self, state: Slot) -> list[int]:
        """None, or some that are right as far as a place that changes from token to token."""
        pattern = state.prefixes[-1] >> 33
        drafts, prefix = [], state.prefixes[-1]
        for place in range(pattern % (self.num_drafts + 1)):
            token = next_token(prefix)
            drafts.append(token if place < pattern // 16 % (self.num_drafts + 2) else (token + 1) % VOCAB)
            prefix = remember(prefix, drafts[-1])
        return drafts

    def _report(
        self,
        state: Slot,
        tokens: list[int],
        rows: list[tuple[int, int, int, int, int]],
        tops: list[tuple[int, np.ndarray, np.ndarray]],
    ) -> None:
        """The rows of a run as far as its end."""
        new = state.new
        first = len(state.tokens) - len(tokens)
        for place, token in enumerate(tokens):
            if new.sequence_id in self.ended:
                return
            index, end = first + place - new.num_prompt_tokens, END_NONE
            if token in new.end_token_ids and index >= new.sampling.min_tokens:
                end = END_STOP
            elif first + place + 1 == new.max_total_tokens:
                end = END_LENGTH
            if end != END_NONE:
                self.ended.add(new.sequence_id)
            if new.sampling.logprobs is not None:
                tops.append((len(rows), *candidates(state.prefixes[first + place - 1], new.sampling.logprobs)))
            rows.append((new.sequence_id, token, index, end, len(self.drafts[new.slot])))
