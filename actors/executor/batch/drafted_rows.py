"""The rows of a step for an engine that speculates.

Lengths of sequences are known on the device only. Rows are laid out for the latest start that the plan allows, within
the sequence's blocks, and the device moves them back to where they begin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.runs import Runs
from pagebus.actors.executor.device.errors import PlanError
from pagebus.bus.messages import Int32Array, StepPlan


@dataclass(slots=True)
class RowBounds:
    """Columns of a plan's R rows: the first token's position, ``earliest`` and at the latest, ``starts``; and where
    the row ends at the latest."""

    earliest: Int32Array
    starts: Int32Array
    ends: Int32Array

    @property
    def exact(self) -> bool:
        """Whether all rows begin where they are laid out."""
        return self.earliest.tobytes() == self.starts.tobytes()


@dataclass(slots=True)
class Samples:
    """The N samples of a step, laid out for the latest starts: the ``rows`` of the pass that have them [N], and
    ``finished`` [M], each of these once; ``context_lens``, ``hidden_index`` and ``earliest_lens`` [N], the fewest
    tokens that a sample can see."""

    rows: Int32Array
    finished: Int32Array
    context_lens: Int32Array
    earliest_lens: Int32Array
    hidden_index: Int32Array
    starts: Int32Array

    def runs(self, num_prompt: Int32Array, max_total: Int32Array, min_tokens: Int32Array, *, exact: bool) -> Runs:
        """Of these columns of the rows [R]; ``exact``: all begin where they are laid out."""
        rows = self.finished
        return Runs(self.starts, max_total[rows] - num_prompt[rows] - np.int32(1), min_tokens[rows], exact)


class KnownLengths:
    """Who knows how long the sequences in the slots [S] are. Drafts in flight make a length ``uncertain`` to the host,
    until a plan says it. A plain step looks up no drafts and tells the device no lengths: those it has are
    ``outdated``."""

    def __init__(self, num_slots: int) -> None:
        self._uncertain = np.zeros(num_slots, np.bool_)
        self._outdated = np.zeros(num_slots, np.bool_)

    def is_plain(self, plan: StepPlan) -> bool:
        """Whether the plan's step looks up no drafts: it does not say where decodes begin, and nobody enters."""
        return plan.num_decodes > 0 and not len(plan.latest_starts) and not plan.new_sequences

    def passed(self, plan: StepPlan, sample_slots: Int32Array) -> None:
        """A plain step samples in these slots.

        Raises:
            PlanError: it does not say where a row begins that drafts may have moved.
        """
        self._check_certain(plan.slots)
        self._outdated[sample_slots] = True

    def followed(self, plan: StepPlan, bounds: RowBounds, deltas: dict[str, Int32Array]) -> None:
        """Put into ``deltas`` what the device needs to follow the lengths of another step's rows.

        Raises:
            PlanError: as :meth:`passed`.
        """
        if plan.new_sequences:
            slots = deltas["entered_slots"] = np.array([new.slot for new in plan.new_sequences], np.int32)
            deltas["entered_lengths"] = np.array([new.num_tokens for new in plan.new_sequences], np.int32)
            deltas["entered_predicted"] = np.array([new.num_predicted for new in plan.new_sequences], np.int32)
            self._uncertain[slots] = self._outdated[slots] = False
        count = len(plan.latest_starts)
        self._check_certain(plan.slots[count:])
        self._uncertain[plan.slots[:count]] = bounds.ends[:count] > bounds.earliest[:count] + 1
        outdated = self._outdated[plan.slots]
        if np.count_nonzero(outdated):
            slots = deltas["resumed_slots"] = plan.slots[outdated]
            deltas["resumed_lengths"] = bounds.starts[outdated] + np.int32(1)
            self._outdated[slots] = False

    def _check_certain(self, slots: Int32Array) -> None:
        uncertain = self._uncertain[slots]
        if np.count_nonzero(uncertain):
            slot = int(slots[uncertain.argmax()])
            raise PlanError(f"slot {slot} had drafts, and nothing says where its row starts")


def row_bounds(plan: StepPlan, computed: Int32Array) -> RowBounds:
    """Where the rows begin, of which so many tokens are ``computed`` [R] at least.

    Raises:
        PlanError: the plan's bounds are none.
    """
    count = len(plan.latest_starts)
    if len(plan.earliest_starts) != count or not (count == 0 or plan.num_decodes <= count <= len(plan.slots)):
        raise PlanError(f"earliest_starts and latest_starts have {len(plan.earliest_starts)} and {count} entries")
    earliest, starts = computed.copy(), computed.copy()
    if count:
        wrong = (plan.earliest_starts < computed[:count]) | (plan.latest_starts < plan.earliest_starts)
        if np.count_nonzero(wrong):
            row = int(wrong.argmax())
            raise PlanError(
                f"slot {int(plan.slots[row])} starts from {int(plan.earliest_starts[row])} to "
                f"{int(plan.latest_starts[row])}, {int(computed[row])} tokens are computed"
            )
        earliest[:count], starts[:count] = plan.earliest_starts, plan.latest_starts
    return RowBounds(earliest, starts, starts + plan.num_scheduled)


def check_rows(
    plan: StepPlan, limits: BatchLimits, bounds: RowBounds, known: Int32Array, num_blocks: Int32Array,
    max_total: Int32Array,
) -> None:  # fmt: skip
    """Rows compute, at the latest, into existing blocks and no last token; others than drafts only tokens that are
    ``known`` [R] to be there.

    Raises:
        PlanError: one does not.
    """
    count = len(plan.latest_starts)
    room = np.minimum(num_blocks * limits.block_size, max_total - 1)
    drafts = plan.num_scheduled[:count] - 1
    plain, others = plan.num_scheduled[: plan.num_decodes] != 1, bounds.ends[count:] > known[count:]
    decodes = bounds.ends[count : plan.num_decodes] != known[count : plan.num_decodes]
    for what, wrong in (
        ("computes beyond its last block, or its end", bounds.ends > room),
        (f"has more than {limits.num_drafts} drafts", drafts > limits.num_drafts),
        ("is counted as a decode but is none", plain),
        ("computes beyond its last token", np.concatenate((drafts < 0, others))),
        ("is counted as a decode but is none", np.concatenate((np.zeros(count, np.bool_), decodes))),
    ):
        if np.count_nonzero(wrong):
            row = int(wrong.argmax())
            raise PlanError(f"slot {int(plan.slots[row])} {what}: up to token {int(bounds.ends[row])}")


def lay_out(plan: StepPlan, bounds: RowBounds, known: Int32Array, query_start: Int32Array) -> Samples:
    """The samples of a checked plan: behind each token of decodes and rows with drafts, and of other rows behind the
    last token that is ``known`` [R]."""
    count = len(plan.latest_starts)
    if len(plan.slots) == plan.num_decodes == count:  # one token each
        every = np.arange(count + 1, dtype=np.int32)
        rows = every[:-1]
        return Samples(rows, rows, bounds.ends, bounds.earliest + np.int32(1), rows, every)
    widths = np.ones(len(plan.slots), np.int32)
    widths[:count] = plan.num_scheduled[:count]
    widths[count:][bounds.ends[count:] != known[count:]] = 0
    finished = np.flatnonzero(widths).astype(np.int32)
    starts = np.zeros(len(finished) + 1, np.int32)
    np.cumsum(widths[finished], out=starts[1:])
    rows = np.repeat(finished, widths[finished])
    places = np.arange(len(rows), dtype=np.int32) - np.repeat(starts[:-1], widths[finished])
    back = widths[rows] - 1 - places  # samples of a row that follow
    return Samples(
        rows=rows,
        finished=finished,
        context_lens=(bounds.ends[rows] - back).astype(np.int32),
        earliest_lens=(bounds.ends[rows] - back - bounds.starts[rows] + bounds.earliest[rows]).astype(np.int32),
        hidden_index=(query_start[rows + 1] - 1 - back).astype(np.int32),
        starts=starts,
    )
