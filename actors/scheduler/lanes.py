"""The beams of one request on a replica: which sequence is which beam, and how they fork from each other.

A beam search is one sequence, its *leader*, as long as it waits. Admitted, it takes a slot for each of its beams at
once, and it is preempted as one: so no search holds half of what it needs and waits for the other half. The other lanes
are parked, with neither tokens nor blocks, until there is something to share:

* The leader computes the prompt. With its result the first choice is made, and the lanes fork from it.
* After a preemption the leader computes its own beam (or gets it from the host tier); each lane forks from it where the
  beams part, and computes the rest.

All beams sample at the same output index, then wait (*held*) for the choice, which needs all of their results. A beam
that goes on stays in its slot; one that is not continued gives its slot to a second continuation of another. That one
shares all full blocks by reference and copies the partial one (copy on write) into its own. What no beam needs any more
is free with that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from actors.scheduler.beams import BeamSearch, Count, peak_blocks
from actors.scheduler.events import ProtocolError
from actors.scheduler.landing import Arrival
from actors.scheduler.sequence import Request, Sequence
from bus.messages import Int32Array, SamplingParams, StepResult

if TYPE_CHECKING:
    from actors.scheduler.replica import Replica


class Lanes:
    """``ids`` are those of the other lanes' sequences; ``choice_ids`` those under which the answer is told.

    ``beams[i]`` is the lane of running beam i, None where it has still to follow; a lane's ``choice_index`` is that i.
    """

    def __init__(self, leader: Sequence, new_id: Callable[[], int]) -> None:
        sampling = leader.request.sampling
        self.leader = leader
        self.width = sampling.beam_width
        self.ids = [new_id() for _ in range(self.width - 1)]
        self.choice_ids = [new_id() for _ in range(sampling.n)]
        self.search = search = BeamSearch(
            self.width,
            leader.limit - len(leader.request.prompt),
            leader.request.end_token_ids,
            min_tokens=sampling.min_tokens,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            num_top=sampling.logprobs or 0,
        )
        self.members = [leader]
        self.beams: list[Sequence | None] = []
        self.sampling = replace(SamplingParams(), temperature=0.0, logprobs=search.num_candidates)
        """What executors are told: to report candidates."""
        self._parked: list[Sequence] = []
        self._missing = 0
        self._top_ids = np.empty((0, 0), np.int32)
        self._top_bits = np.empty((0, 0), np.int32)

    # -- coming and going ---------------------------------------------------------------------------------------------
    def settle(self, replica: Replica) -> list[Sequence]:
        """The leader has got a slot; give the others theirs. Returns the others."""
        leader = self.leader
        self.search.max_tokens = leader.limit - len(leader.request.prompt)
        self._parked = [
            Sequence(
                id=lane_id, request=leader.request, choice_index=-1, seed=leader.seed, order=leader.order,
                limit=leader.limit, tokens=array("i"), hashes=[], replica=replica, started=True, produced=True,
                looked_up=True, lanes=self,
            )
            for lane_id in self.ids
        ]  # fmt: skip
        for lane in self._parked:
            replica.running.enter(lane, 0)
        self.members = [leader, *self._parked]
        self.beams = [None] * len(self.search.scores)
        self.beams[leader.choice_index] = leader
        self._expect()
        return self.members[1:]

    def disband(self) -> None:
        """All have left their slots: the leader goes on, or ends, for all."""
        self.members, self._parked, self.beams = [self.leader], [], []

    @property
    def is_complete(self) -> bool:
        """Whether every running beam has its lane."""
        return None not in self.beams

    def follow(self, replica: Replica) -> None:
        """Fork the beams without a lane from the leader, once it is planned to have computed what they share."""
        leader, run = self.leader, replica.running
        if not leader.entered:
            return
        prompt, running = leader.request.prompt, self.search.running()
        own = running[leader.choice_index]
        for beam in [place for place, lane in enumerate(self.beams) if lane is None]:
            common = len(prompt) + int(np.argmax(running[beam] != own))
            if run.computed[leader.slot] < common:
                continue
            lane = self._parked.pop()
            lane.tokens = array("i", prompt)
            lane.tokens.frombytes(running[beam].tobytes())
            self._assign(lane, beam)
            take_over(replica, lane, leader, common)

    # -- the choice ---------------------------------------------------------------------------------------------------
    def give(self, beam: int, top_ids: Int32Array, top_bits: Int32Array) -> bool:
        """The candidates of one beam have come; returns whether all have."""
        self._top_ids[beam], self._top_bits[beam] = top_ids, top_bits
        self._missing -= 1
        return not self._missing

    def advance(self, replica: Replica) -> bool:
        """Make the choice, and arrange the lanes for it. True if the search is over."""
        chosen = self.search.choose(self._top_ids, self._top_bits)
        if chosen is None:
            return True
        before, parents = self.beams, chosen.parents.tolist()
        free = [lane for beam, lane in enumerate(before) if beam not in set(parents)] + self._parked
        self.beams, self._parked, staying = [None] * len(parents), [], set()
        forks = []
        for beam, parent in enumerate(parents):
            lane = before[parent]
            assert lane is not None
            if parent in staying:
                forks.append((beam, lane))
                continue
            staying.add(parent)
            self._assign(lane, beam)
        for (beam, source), lane in zip(forks, free, strict=True):
            assert lane is not None
            replica.running.flush(source.slot)
            lane.tokens = source.tokens[:]
            self._assign(lane, beam)
            take_over(replica, lane, source, len(lane.tokens))
        self._write(replica, chosen.tokens)
        self._expect()
        return False

    def _write(self, replica: Replica, token_ids: Int32Array) -> None:
        """Each beam's next token is known."""
        lanes = [lane for lane in self.beams if lane is not None]
        replica.running.choose_tokens(np.array([lane.slot for lane in lanes], np.intp), token_ids)
        for lane, token_id in zip(lanes, token_ids.tolist(), strict=True):
            if lane.entered:
                replica.builder.choose(lane, token_id)
            else:
                replica.running.flush(lane.slot)  # it brings its tokens along as it enters

    def _assign(self, lane: Sequence, beam: int) -> None:
        lane.choice_index = beam
        self.beams[beam] = lane

    def _expect(self) -> None:
        """Candidates of every running beam are to come."""
        self._missing = len(self.beams)
        shape = len(self.beams), self.search.num_candidates
        self._top_ids, self._top_bits = np.zeros(shape, np.int32), np.zeros(shape, np.int32)

    def check_integrity(self, replica: Replica) -> None:
        """Every running beam that has a lane has one of its own, and the leader has one.

        Raises:
            AssertionError: it is not so.
        """
        lanes = [lane for lane in self.beams if lane is not None]
        assert {lane.id for lane in [*lanes, *self._parked]} == {lane.id for lane in self.members}
        assert len(lanes) + len(self._parked) == len(self.members) == self.width
        assert self.leader in lanes, "the leader has no beam"
        assert all(lane.slot >= 0 and lane.replica is replica for lane in self.members)
        assert all(not lane.blocks and not lane.entered for lane in self._parked)
        assert [lane.choice_index for lane in lanes] == [i for i, lane in enumerate(self.beams) if lane is not None]
        assert 0 < self._missing <= len(self.beams)


def take_over(replica: Replica, lane: Sequence, source: Sequence, common: int) -> None:
    """``lane``, which has its new tokens already, shares what ``source`` has computed of the first ``common``. If it
    was another beam before, it gives up what the two do not share; its partial block becomes the copy of the
    source's."""
    pool, run = replica.pool, replica.running
    full, rest = divmod(common, replica.block_size)
    keep = 0
    if lane.entered:
        own = lane.blocks[full:]
        while keep < full and lane.blocks[keep] == source.blocks[keep]:
            keep += 1
        pool.retain(source.blocks[keep:full])
        pool.release(reversed(lane.blocks[keep:full]))
    else:
        pool.retain(source.blocks[:full])
        own = pool.allocate(1) if rest and pool.num_free else []
        if not own:
            common -= rest  # there is no block to copy into: these tokens are computed again
    lane.blocks = source.blocks[:full] + own
    if own:
        lane.copied = source.blocks[full], own[0]
        pool.retain(lane.copied[:1])
    if replica.caching:
        source.extend_hashes(replica.block_size)
        lane.hashes = source.hashes[:full]
    lane.num_cached = common
    run.place(lane, common)
    if lane.entered:
        replica.builder.rewrite(lane, keep if keep < full else len(lane.blocks))


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """What a result says of one beam: its most likely tokens [k] and their log probabilities' bits."""

    lane: Sequence
    top_ids: Int32Array
    top_bits: Int32Array


def candidates(replica: Replica, arrival: Arrival, result: StepResult) -> list[Candidates]:
    """Those of all beams in a result. Changes nothing.

    Raises:
        ProtocolError: some are missing.
    """
    run = replica.running
    beams = np.flatnonzero(run.beam[arrival.slots])
    if not len(beams):
        return []
    rows = beams if arrival.running is None else np.flatnonzero(arrival.running)[beams]
    places = np.searchsorted(result.logprob_rows, rows)
    ends = np.cumsum(result.top_counts)
    if not len(ends) or not np.array_equal(result.logprob_rows[np.minimum(places, len(ends) - 1)], rows):
        raise ProtocolError(f"step {result.step}: a beam has no candidates")
    if len(result.logprob_rows) != len(ends) or not ends[-1] == len(result.top_ids) == len(result.top_bits):
        raise ProtocolError(f"step {result.step}: the columns of log probabilities differ in length")
    found = []
    for slot, place in zip(arrival.slots[beams].tolist(), places.tolist(), strict=True):
        lane = run.at(slot)
        assert lane.lanes is not None
        count, end = lane.lanes.search.num_candidates, int(ends[place])
        if result.top_counts[place] != count:
            raise ProtocolError(
                f"step {result.step}: a beam has {int(result.top_counts[place])} candidates, not {count}"
            )
        found.append(Candidates(lane, result.top_ids[end - count : end], result.top_bits[end - count : end]))
    return found


def blocks_needed(request: Request, num_tokens: Count, block_size: int) -> Count:
    """Blocks in which ``num_tokens`` computed tokens of a request, or of each of its beams, always fit."""
    return peak_blocks(len(request.prompt), num_tokens, max(1, request.sampling.beam_width), block_size)
