"""The work of one step on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.executor.batch.logprob_rows import LogprobRows
from pagebus.actors.executor.batch.runs import Runs, ToldRuns
from pagebus.bus.messages import Int32Array
from pagebus.bus.messages.field_types import no_ints
from pagebus.kernels.attention.cudnn_prefill import LongRow

BoolArray = NDArray[np.bool_]

TRUNCATED, PENALIZED, MASKED, WORDED, CONSTRAINED = 1, 2, 4, 8, 16
"""Bits of a slot's extras: top-k, top-p or min-p; any penalty; a mask of allowed tokens; bad words of several tokens; a
grammar, which gives a mask anew for each token.
Rules (bias, bans) end at an index of their own."""
RANDOM = 32
"""A further bit, which is no extra: whether the slot samples at random."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Changes to the logits of some rows beyond plain sampling.

    ``ruled``: bans and biases. ``masked``: permanent masks of a sequence. ``constrained``: masks of grammars, new for
    each step. ``worded``: bad words of several tokens. ``penalized``: any penalty. ``truncated``: top-k, top-p or
    min-p.
    """

    ruled: bool = False
    masked: bool = False
    constrained: bool = False
    worded: bool = False
    penalized: bool = False
    truncated: bool = False


NO_EXTRAS = Extras()


@dataclass(slots=True)
class StepWork:
    """One validated step: R rows with T tokens in total, of which N rows sample a token.

    ``slots``, ``starts`` [R] and ``query_start`` [R+1] define the pass. ``hidden_index`` [N] is the token of the pass
    behind which a token is sampled, and ``context_lens`` [N] the number of tokens that it sees, itself included. The
    sampled token is stored at ``positions`` [N]; its output index is ``indexes`` [N]. ``deltas`` holds the other
    uploads, by name.

    The rest is for the receiver of the tokens: ``sequence_ids``, ``sample_slots``, ``length_ended``, ``can_stop`` [N],
    ``end_ids`` [N, E] (-1 is empty), and ``new_slots``, which sequences have entered. ``constrained`` [C]: the rows of
    the N that follow a grammar. ``broken``: those of them whose grammar turned out to be impossible.
    """

    num_decodes: int
    num_tokens: int
    max_query_len: int
    max_context_len: int
    slots: Int32Array
    starts: Int32Array
    query_start: Int32Array
    positions: Int32Array
    indexes: Int32Array
    hidden_index: Int32Array
    context_lens: Int32Array
    sample_slots: Int32Array
    sequence_ids: Int32Array
    length_ended: BoolArray
    can_stop: BoolArray
    end_ids: Int32Array
    deltas: dict[str, Int32Array]
    new_slots: list[int] = field(default_factory=list)
    any_random: bool = False
    extra_random: bool = False
    """Whether any of the rows with extras samples at random."""
    extras: Extras = NO_EXTRAS
    constrained: Int32Array = field(default_factory=no_ints)
    broken: list[int] = field(default_factory=list)
    logprob_rows: LogprobRows | None = None
    agreed: Int32Array | None = None
    """What ranks tell each other, of :class:`~pagebus.actors.executor.device.agreement.Agreement`; None: there is one
    rank."""
    runs: Runs | None = None
    """Of an engine that speculates, by row; then what is said of samples holds for the latest starts of their rows."""

    @property
    def num_results(self) -> int:
        """How many numbers come back from the device."""
        return len(self.positions) + (0 if self.runs is None else self.runs.num_told)

    @property
    def decode_only(self) -> bool:
        return self.num_decodes == len(self.slots)

    @property
    def wants_all(self) -> bool:
        """Whether the hidden states of all tokens are needed."""
        scored = self.logprob_rows is not None and self.logprob_rows.reads_prompts
        return scored or len(self.hidden_index) == self.num_tokens

    def mark_extras(self, kinds: Int32Array, ruled: BoolArray) -> None:
        """Put the sampled rows that need more than plain sampling into ``deltas["extra_rows"]``, absent if there are
        none. ``kinds`` [N] are the rows' bits, and ``ruled`` [N] those to which biases may apply."""
        every_kind = int(np.bitwise_or.reduce(kinds))
        self.any_random, any_ruled = bool(every_kind & RANDOM), bool(np.count_nonzero(ruled))
        if not (every_kind & ~RANDOM or any_ruled):
            return
        (rows,) = ((kinds & ~RANDOM != 0) | ruled).nonzero()
        self.deltas["extra_rows"] = rows.astype(np.int32)
        kinds = kinds[rows]
        every_kind = int(np.bitwise_or.reduce(kinds))
        self.extra_random = bool(every_kind & RANDOM)
        self.extras = Extras(
            ruled=any_ruled,
            masked=bool(every_kind & MASKED),
            constrained=bool(every_kind & CONSTRAINED),
            worded=bool(every_kind & WORDED),
            penalized=bool(every_kind & PENALIZED),
            truncated=bool(every_kind & TRUNCATED),
        )
        if self.extras.constrained:
            self.constrained = rows[kinds & CONSTRAINED != 0].astype(np.int32)

    def agree_on(self, numbers: Int32Array) -> None:
        """Have the ranks compare these ``numbers`` of the step."""
        self.agreed = numbers

    def resolve(self, told: ToldRuns) -> None:
        """Replace what holds for the latest starts of the runs by what the device has ``told`` of them."""
        self.indexes, self.length_ended, self.can_stop = told.indexes, told.length_ended, told.can_stop


def prefill_rows(work: StepWork) -> tuple[LongRow, ...]:
    """The rows after the decodes, from the host's numbers."""
    rows = range(work.num_decodes, len(work.slots))
    counts = np.diff(work.query_start)
    found = (
        LongRow(row, int(work.query_start[row]), int(counts[row]), int(work.starts[row] + counts[row])) for row in rows
    )
    return tuple(found)
