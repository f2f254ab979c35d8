"""The slots of one replica: arrays with one row per slot, so that a step of any size is planned by array operations.

The principle: computed tokens catch up with tokens. Chunked prefill, prefix hits, resumption after preemption and
decode differ only in how far ``computed`` is behind ``total``. Positions of a sequence's tokens::

    0 ............ computed ............ known ............ total ........ limit
    | planned, if not yet | their values are | sampled by steps in |
    | computed            | known too        | flight              |

Where decodes are planned ahead, ``computed`` may exceed ``known``. Full blocks of tokens that are both planned and
known are listed in the prefix index.

The last token is never computed, as it would only serve a token beyond the limit. So a sequence is behind by
``min(total, limit - 1) - computed`` tokens. Values are int32. Empty slots hold 0 everywhere and are behind by nothing.

A beam that has sampled is *held*, and behind by nothing, until its search has chosen its next token.

Where sequences speculate, ``computed`` and ``total`` count one token for each step in flight, the least that there will
be. Drafts may make both larger, by ``ahead`` at most. A slot with drafts in flight is behind by nothing where these may
reach its limit: so none is ever computed beyond it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.request import Sequence
from pagebus.actors.scheduler.states import State
from pagebus.bus.messages import Int32Array

Slots = NDArray[np.intp] | Int32Array


class SlotTable:
    """State of all slots. ``tail`` [num_slots, block_size] holds each sequence's newest tokens at position %
    block_size: those known since its last full block. ``num_drafts``: the most that a row may have; ``drafts``: how
    many of each slot were ready when its newest result was made; ``verified``, ``accepted``: their counts;
    ``moved``: drafts may have moved the start of the slot's row since a plan last named it.
    ``adapter``: a hash of each slot's adapter, 0 without one; that two adapters share a hash is harmless."""

    def __init__(self, num_slots: int, block_size: int, num_drafts: int = 0) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.num_drafts = num_drafts
        self.ahead = np.zeros(num_slots, np.int32)
        self.drafts = np.zeros(num_slots, np.int32)
        self.most_drafts = np.zeros(num_slots, np.int32)
        self.verified = np.zeros(num_slots, np.int32)
        self.accepted = np.zeros(num_slots, np.int32)
        self.moved = np.zeros(num_slots, np.bool_)
        self.ids = np.zeros(num_slots, np.int32)
        self.prompt = np.zeros(num_slots, np.int32)
        self.known = np.zeros(num_slots, np.int32)
        self.total = np.zeros(num_slots, np.int32)
        self.last = np.zeros(num_slots, np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        self.indexed = np.zeros(num_slots, np.int32)
        self.capacity = np.zeros(num_slots, np.int32)
        self.first = np.zeros(num_slots, np.int32)
        self.planned = np.zeros(num_slots, np.int32)
        self.job = np.zeros(num_slots, np.bool_)
        self.beam = np.zeros(num_slots, np.bool_)
        self.adapter = np.zeros(num_slots, np.int64)
        self.held = np.zeros(num_slots, np.bool_)
        self.num_beams = 0
        self.tail = np.zeros((num_slots, block_size), np.int32)
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.num_jobs = 0
        self._backlogs: dict[int, int] = {}
        self._free = list(range(num_slots))
        heapify(self._free)

    def __len__(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    def behind(self) -> Int32Array:
        """Tokens that each slot can still compute, beyond those already planned [num_slots]."""
        tokens = np.minimum(self.total, self.last)
        tokens -= self.computed
        if self.num_beams:
            tokens[self.held] = 0
        if self.num_drafts:
            tokens[(self.ahead > 0) & (self.computed + self.ahead >= self.last)] = 0
        return tokens

    def backlog(self, priority_class: int) -> int:
        """The sum of :meth:`behind` over sequences up to this priority class, cached until it changes."""
        if not self.num_jobs:
            priority_class = JOB
        known = self._backlogs.get(priority_class)
        if known is None:
            behind = self.behind()
            if priority_class != JOB:
                behind[self.job] = 0
            known = self._backlogs[priority_class] = int(behind.sum())
        return known

    def promote(self, slot: int) -> None:
        """Turn the job in a slot into an interactive request."""
        self.num_jobs -= bool(self.job[slot])
        self.job[slot] = False
        self._backlogs.clear()

    def num_missing_blocks(self, most: int | None = None) -> int:
        """Blocks that the tokens of running sequences still need. With ``most``, none but beams ever hold more than so
        many."""
        missing = self.total - self.capacity
        lacking = missing > 0
        missing = -(-missing[lacking] // self.block_size)
        if most is not None and len(missing):
            held = self.capacity[lacking] // self.block_size - self.first[lacking]
            missing = np.where(self.beam[lacking], missing, np.minimum(missing, np.maximum(most - held, 0)))
        return int(missing.sum())

    def at(self, slot: int) -> Sequence:
        """The sequence in an occupied slot."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence's slot is one of this table."""
        return sequence.slot < self.num_slots and self.sequences[sequence.slot] is sequence

    def occupied(self) -> list[Sequence]:
        """All running sequences, best first: the order in which they get blocks, and the reverse of preemption."""
        return sorted((sequence for sequence in self.sequences if sequence is not None), key=lambda each: each.key)

    def enter(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Give the sequence the lowest free slot. Its ``blocks`` hold ``num_cached_tokens`` computed tokens."""
        slot = heappop(self._free)
        self.ids[slot] = sequence.id
        self.prompt[slot] = len(sequence.request.prompt)
        self.last[slot] = sequence.limit - 1
        self.planned[slot] = 0
        self.job[slot] = sequence.request.priority_class == JOB
        self.num_jobs += sequence.request.priority_class == JOB
        self.beam[slot] = sequence.beam_group is not None
        self.num_beams += sequence.beam_group is not None
        digest = sequence.request.digest
        self.adapter[slot] = crc32(digest.encode()) if digest else 0
        self.most_drafts[slot] = self.num_drafts and most_drafts(sequence, self.num_drafts)
        self.sequences[slot] = sequence
        sequence.enter_slot(slot)
        sequence.become(State.BOUND)
        self.place(sequence, num_cached_tokens)

    def place(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Set a slot's row from its sequence's ``tokens`` and ``blocks``, with this many of them computed."""
        slot, size = sequence.slot, self.block_size
        self._backlogs.clear()
        self.known[slot] = self.total[slot] = len(sequence.tokens)
        self.computed[slot] = num_cached_tokens
        self.indexed[slot] = num_cached_tokens // size
        self.first[slot] = sequence.first_kept
        self.capacity[slot] = sequence.end_block * size

    def leave(self, sequence: Sequence) -> None:
        """Vacate the sequence's slot. All known tokens are in ``sequence.tokens`` afterwards."""
        slot = sequence.slot
        self.flush(slot)
        self._backlogs.clear()
        last_step = int(self.planned[slot])
        for column in (self.ids, self.prompt, self.known, self.total, self.last):
            column[slot] = 0
        for column in (self.computed, self.indexed, self.capacity, self.first, self.planned):
            column[slot] = 0
        sequence.request.verified(int(self.verified[slot]), int(self.accepted[slot]))
        for column in (self.ahead, self.drafts, self.most_drafts, self.verified, self.accepted):
            column[slot] = 0
        self.adapter[slot] = 0
        self.num_jobs -= int(self.job[slot])
        self.num_beams -= int(self.beam[slot])
        for flag in (self.job, self.beam, self.held, self.moved):
            flag[slot] = False
        self.sequences[slot] = None
        sequence.leave_slot(last_step)
        heappush(self._free, slot)

    def flush(self, slot: int) -> None:
        """Move tokens known only here to ``sequence.tokens``. Call it at least at every block boundary."""
        tokens = self.at(slot).tokens
        start = len(tokens)
        count = int(self.known[slot]) - start
        if count > 0:
            offset = start % self.block_size
            tokens.frombytes(self.tail[slot, offset : offset + count].tobytes())

    def advance(self, slots: Slots, counts: Int32Array, step: int) -> NDArray[np.bool_]:
        """Plan ``counts`` more tokens of each slot in ``step``. Returns a mask of the rows that sample a token
        [rows]."""
        self._backlogs.clear()
        computed = self.computed[slots] + counts
        total = self.total[slots]
        samples: NDArray[np.bool_] = computed == total
        self.computed[slots] = computed
        self.total[slots] = total + samples
        self.planned[slots] = step
        if self.num_beams:
            self.held[slots] = self.beam[slots] & samples
        return samples

    def take_tokens(self, slots: Slots, token_ids: Int32Array) -> None:
        """Store one sampled token of each slot."""
        known, size = self.known[slots], self.block_size
        offsets = known % size
        self.tail[slots, offsets] = token_ids
        known += 1
        self.known[slots] = known
        full = slots[offsets == size - 1]
        if len(full):
            self._flush_full(full)

    def plan_drafts(self, slots: Slots, drafts: Int32Array) -> None:
        """Plan more drafts for slots, besides the tokens of :meth:`advance`; the plan names where their rows begin."""
        self._backlogs.clear()
        ahead = self.ahead[slots] + drafts
        self.ahead[slots], self.moved[slots] = ahead, ahead > 0

    def settle_drafts(self, slots: Slots, accepted: Int32Array, planned: Int32Array) -> Int32Array:
        """Apply how many of the ``planned`` drafts of each slot a step has accepted. Returns how many it verified:
        fewer than planned may have been ready."""
        self._backlogs.clear()
        verified: Int32Array = np.minimum(self.drafts[slots], planned)
        self.verified[slots] += verified
        self.accepted[slots] += accepted
        self.computed[slots] += accepted
        self.total[slots] += accepted
        self.ahead[slots] -= planned
        return verified

    def _flush_full(self, slots: Slots) -> None:
        """:meth:`flush` for slots that have reached the end of a block."""
        rows = self.tail[slots].tobytes()
        width = 4 * self.block_size
        for end, slot in enumerate(slots.tolist(), 1):
            tokens = self.at(slot).tokens
            start = 4 * (len(tokens) % self.block_size)
            tokens.frombytes(rows[(end - 1) * width + start : end * width])

    def choose_tokens(self, slots: Slots, token_ids: Int32Array) -> None:
        """Store the next token of each beam [beams], and stop holding it."""
        self._backlogs.clear()
        self.take_tokens(slots, token_ids)
        self.total[slots] = self.known[slots]
        self.held[slots] = False

    def check_integrity(self) -> None:
        """Arrays, sequences and free slots agree.

        Raises:
            AssertionError: they do not.
        """
        free = sorted(self._free)
        assert free == [slot for slot, each in enumerate(self.sequences) if each is None]
        assert not self.ids[free].any()
        assert not self.behind()[free].any()
        assert self.num_jobs == np.count_nonzero(self.job)
        assert self.num_beams == np.count_nonzero(self.beam), "beams are counted wrongly"
        assert not (self.held & ~self.beam).any(), "a sequence is held that is no beam"
        kept, self._backlogs = self._backlogs, {}
        assert all(self.backlog(priority_class) == tokens for priority_class, tokens in kept.items()), (
            "a backlog is out of date"
        )
        for sequence in self.sequences:
            if sequence is not None:
                self._check_row(sequence)

    def _check_row(self, sequence: Sequence) -> None:
        """The row of one sequence agrees with it. Every simulated step runs this, so each number is read once."""
        slot = sequence.slot
        computed, known, total = int(self.computed[slot]), int(self.known[slot]), int(self.total[slot])
        capacity = sequence.end_block * self.block_size
        checks = {
            "believes to be elsewhere": self.sequences[slot] is sequence and self.ids[slot] == sequence.id,
            "does not run": sequence.in_slot,
            "wrongly a beam": self.beam[slot] == (sequence.beam_group is not None),
            "wrong priority class": self.job[slot] == (sequence.request.priority_class == JOB),
            "wrong capacity": self.capacity[slot] == capacity,
            "wrong first block": self.first[slot] == sequence.first_kept,
            "computed too much": computed <= total and computed + self.ahead[slot] <= capacity,
            "beyond its limit": known <= total and total + self.ahead[slot] <= self.last[slot] + 1,
            "tokens not flushed": 0 <= known - len(sequence.tokens) < self.block_size,
            "listed too early": self.indexed[slot] * self.block_size <= min(computed, known),
        }
        wrong = [what for what, right in checks.items() if not right]
        assert not wrong, f"sequence {sequence.id} in slot {slot}: {', '.join(wrong)}"


def most_drafts(sequence: Sequence, most: int) -> int:
    """How many drafts of the sequence's next tokens a step may verify, ``most`` or fewer: none of beams, which change
    their past."""
    sampling = sequence.request.sampling
    if sequence.beam_group is not None:
        return 0
    return most if sampling.num_speculative_tokens is None else min(most, sampling.num_speculative_tokens)
