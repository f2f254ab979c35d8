"""Plans with drafts of which it is known beforehand what becomes of them: all are accepted, or none.

The model's last norm is set to zero, so that all that it answers is one token. Its history drafts just this token, and
any other draft is wrong.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pagebus.actors.executor.device.operations import LookUpDrafts
from pagebus.actors.executor.models.draft_model import DraftModel
from pagebus.actors.executor.models.mtp import Mtp
from pagebus.bus.messages import Int32Array, StepPlan
from pagebus.kernels.batch.draft_lookup import look_up_drafts, look_up_drafts_reference, store_drafts_reference
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from tests.helpers.engine_driver import Driver, Grown, HandScheduler, ints

TOKEN, WRONG = 0, 1
"""What the model answers, and a draft that is never right."""
MODES = ("off", "idle", "none", "full")
"""Without speculation; with it, but no draft is found; with drafts that are all wrong; with drafts that are right."""


class DraftedScheduler(HandScheduler):
    """Plans ``num_drafts`` drafts with each decode, which are all ``right``, or all wrong. Prompts are computed
    first."""

    def __init__(self, driver: Driver, num_drafts: int, *, right: bool) -> None:
        driver.epoch += 1
        info = driver.info
        super().__init__(info.num_blocks, info.block_size, info.max_num_seqs, info.max_num_batched_tokens)
        self.num_drafts, self.right = num_drafts, right

    def plan(self) -> StepPlan | None:
        """The next step; None if all have their tokens."""
        if self.waiting or any(each.num_tokens > each.num_computed + 1 for each in self.running):
            return super().plan()
        going = [each for each in self.running if each.num_tokens < each.max_total]
        rows = [(each, min(self.num_drafts, each.max_total - each.num_tokens - 1)) for each in going]
        rows.sort(key=lambda row: row[1] > 0)
        accepted = self.accepted(self.num_drafts)
        starts, appended = ints([each.num_computed for each, _ in rows]), []
        for each, drafts in rows:
            appended += self._grow(each, each.num_tokens + drafts)
            each.num_tokens += 1 + min(drafts, accepted)
            each.num_computed = each.num_tokens - 1
        return self._drafted(rows, appended, starts) if rows else None

    def accepted(self, drafts: int) -> int:
        """How many of so many drafts of a row the next step accepts."""
        return drafts * self.right

    def _drafted(self, rows: list[tuple[Grown, int]], appended: list[tuple[int, int]], starts: Int32Array) -> StepPlan:
        self.step += 1
        return StepPlan(
            step=self.step,
            planned_s=0.0,
            num_decodes=sum(drafts == 0 for _, drafts in rows),
            appended_slots=ints([slot for slot, _ in appended]),
            appended_blocks=ints([block for _, block in appended]),
            slots=ints([each.slot for each, _ in rows]),
            num_scheduled=ints([1 + drafts for _, drafts in rows]),
            earliest_starts=starts,
            latest_starts=starts,
        )


def prepare(driver: Driver, mode: str) -> None:
    """Let the model answer one token, and the drafter be right or wrong."""
    runner = driver.engine._loaded.runner
    runner.model.norm.weight.data.zero_()
    head = None if runner.drafting is None else runner.drafting.head
    if head is not None and isinstance(head.head, DraftModel):
        # Of random weights, tied, a model says what it reads; turned around, anything else.
        head.head.model.norm.weight.data.fill_(-1.0 if mode == "none" else 0.0)
    elif head is not None and isinstance(head.head, Mtp):
        head.head._norm.weight.data.fill_(1.0 if mode == "none" else 0.0)
    elif runner.drafting is not None:
        look_up = _right(driver)
        runner.drafting.look_up = {"none": _wrong, "idle": partial(_vain, look_up)}.get(mode, look_up)


def _vain(
    look_up: LookUpDrafts, tokens: torch.Tensor, lengths: torch.Tensor, found: torch.Tensor, slots: torch.Tensor,
    num_drafts: int, shortest: int, longest: int, vocab_size: int, *rest: Any,
) -> None:  # fmt: skip
    """Look up, and find no token that the model knows."""
    look_up(tokens, lengths, found, slots, num_drafts, shortest, longest, 0, *rest)


def _right(driver: Driver) -> LookUpDrafts:
    return driver.engine._loaded.runner._ops.look_up_drafts


@triton.jit(do_not_specialize=["slots_ptr", "out_ptr"])
def _wrong_kernel(
    tokens_ptr, lengths_ptr, found_ptr, slots_ptr, out_ptr, stride_tokens, NUM_DRAFTS: tl.constexpr,
    DRAFTS: tl.constexpr, WRONG_TOKEN: tl.constexpr
):  # fmt: skip
    run = tl.program_id(0)
    slot = tl.load(slots_ptr + run).to(tl.int64)
    step = tl.arange(0, DRAFTS)
    place = tokens_ptr + slot * stride_tokens + tl.load(lengths_ptr + slot) + step
    tl.store(place, tl.full([DRAFTS], WRONG_TOKEN, tl.int32), mask=step < NUM_DRAFTS)
    tl.store(found_ptr + slot, NUM_DRAFTS)
    tl.store(out_ptr + run, NUM_DRAFTS)


def _wrong(
    tokens: torch.Tensor, lengths: torch.Tensor, found: torch.Tensor, slots: torch.Tensor, num_drafts: int,
    shortest: int, longest: int, vocab_size: int, out: torch.Tensor, predicted: torch.Tensor, first_predicted: int,
) -> None:  # fmt: skip
    """Look up, then draft what is wrong."""
    if not tokens.is_cuda:
        look_up_drafts_reference(
            tokens, lengths, found, slots, num_drafts, shortest, longest, vocab_size, out, predicted, first_predicted
        )  # fmt: skip
        wrong = torch.full((len(slots), num_drafts), WRONG, dtype=torch.int32)
        store_drafts_reference(tokens, lengths, found, slots, wrong, vocab_size)
        out.copy_(found[slots.long()])
        return
    look_up_drafts(
        tokens, lengths, found, slots, num_drafts, shortest, longest, vocab_size, out, predicted, first_predicted
    )  # fmt: skip
    _wrong_kernel[(len(slots),)](
        tokens, lengths, found, slots, out, tokens.stride(0), NUM_DRAFTS=num_drafts,
        DRAFTS=next_power_of_2(num_drafts), WRONG_TOKEN=WRONG,
    )  # fmt: skip
