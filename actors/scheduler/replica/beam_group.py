"""Beam groups on a replica: assigns sequences to beams, and forks them from each other.

While it waits, a beam search is one sequence, its *leader*. On admission it takes a slot for each of its beams at once,
and it is preempted as a whole. So no search holds half of the slots that it needs while it waits for the rest. The
other members are parked, without tokens or blocks, until there is something to share:

* The leader computes the prompt. Its result makes the first choice possible, and the members fork from it.
* After a preemption the leader computes its own beam, or loads it from the host tier. Each member forks from it where
  the beams part, and computes the rest.

All beams sample at the same output index. They are then *held* until the search has chosen, which needs all of their
results. A beam that continues keeps its slot. One that is not continued gives its slot to a second continuation of
another beam. That continuation shares all full blocks by reference and copies the partial one into its own (copy on
write). Blocks that no beam needs any more are thereby free.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagebus.actors.scheduler.beam_search import BeamSearch
from pagebus.actors.scheduler.events import ProtocolError
from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.actors.scheduler.replica.step_results import ResultRows
from pagebus.actors.scheduler.request import BeamGroup, Sequence
from pagebus.bus.messages import Int32Array, SamplingParams, StepResult


def new_group(leader: Sequence, new_id: Callable[[], int]) -> BeamGroup:
    """The group of a search that has just arrived, as one waiting sequence."""
    sampling = leader.request.sampling
    search = BeamSearch(
        sampling.beam_width,
        leader.limit - len(leader.request.prompt),
        leader.request.end_token_ids,
        min_tokens=sampling.min_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        num_top=sampling.logprobs or 0,
    )
    return BeamGroup(
        leader=leader,
        ids=[new_id() for _ in range(sampling.beam_width - 1)],
        choice_ids=[new_id() for _ in range(sampling.n)],
        search=search,
        sampling=SamplingParams(temperature=0.0, logprobs=search.num_candidates),
        members=[leader],
    )


# -- coming and going -------------------------------------------------------------------------------------------------
def take_slots(replica: ReplicaBase, group: BeamGroup) -> list[Sequence]:
    """Give the other members of an admitted leader their slots, and return them."""
    leader = group.leader
    group.search.limit_to(leader.limit - len(leader.request.prompt))
    others = [_member(replica, group, member_id) for member_id in group.ids]
    for member in others:
        replica.slots.enter(member, 0)
    group.gather(others)
    group.expect(group.search.num_candidates)
    return others.copy()


def _member(replica: ReplicaBase, group: BeamGroup, member_id: int) -> Sequence:
    """A member without tokens or blocks."""
    leader = group.leader
    return Sequence(
        id=member_id, request=leader.request, choice_index=-1, seed=leader.seed, order=leader.order,
        limit=leader.limit, tokens=array("i"), hashes=[], replica=replica.name, started=True, produced=True,
        looked_up=True, beam_group=group,
    )  # fmt: skip


def fork_members(replica: ReplicaBase, group: BeamGroup) -> None:
    """Fork beams without a member from the leader, once a plan computes the tokens that they share."""
    leader, table = group.leader, replica.slots
    if not leader.entered:
        return
    prompt, running = leader.request.prompt, group.search.running()
    own = running[leader.choice_index]
    for beam in [place for place, member in enumerate(group.beams) if member is None]:
        common = len(prompt) + int(np.argmax(running[beam] != own))
        if table.computed[leader.slot] < common:
            continue
        member = group.parked.pop()
        tokens = array("i", prompt)
        tokens.frombytes(running[beam].tobytes())
        _assign(group, member, beam, tokens)
        fork_from(replica, member, leader, common)


# -- the choice -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """One beam's candidates in a result: its most likely tokens [k] and the bits of their log probabilities."""

    member: Sequence
    top_ids: Int32Array
    top_bits: Int32Array


def record(group: BeamGroup, candidates: Candidates) -> bool:
    """Store the candidates of one beam; returns whether those of all beams are there."""
    return group.record(candidates.member.choice_index, candidates.top_ids, candidates.top_bits)


def choose_next(replica: ReplicaBase, group: BeamGroup) -> bool:
    """Choose the beams that continue and arrange the members for them. Returns whether the search is over."""
    chosen = group.search.choose(group.top_ids, group.top_bits)
    if chosen is None:
        return True
    before, parents = group.beams, chosen.parents.tolist()
    free = [member for beam, member in enumerate(before) if beam not in set(parents)] + group.parked
    group.start_round(len(parents))
    staying, forks = set(), []
    for beam, parent in enumerate(parents):
        member = before[parent]
        assert member is not None
        if parent in staying:
            forks.append((beam, member))
            continue
        staying.add(parent)
        _assign(group, member, beam, member.tokens)
    for (beam, source), member in zip(forks, free, strict=True):
        assert member is not None
        replica.slots.flush(source.slot)
        _assign(group, member, beam, source.tokens[:])
        fork_from(replica, member, source, len(member.tokens))
    _write(replica, group, chosen.tokens)
    group.expect(group.search.num_candidates)
    return False


def _write(replica: ReplicaBase, group: BeamGroup, token_ids: Int32Array) -> None:
    """Store each beam's next token."""
    members = [member for member in group.beams if member is not None]
    replica.slots.choose_tokens(np.array([member.slot for member in members], np.intp), token_ids)
    for member, token_id in zip(members, token_ids.tolist(), strict=True):
        if member.entered:
            replica.builder.choose(member, token_id)
        else:
            replica.slots.flush(member.slot)  # it brings its tokens along as it enters


def _assign(group: BeamGroup, member: Sequence, beam: int, tokens: array[int]) -> None:
    member.fork(tokens, beam)
    group.beams[beam] = member


def check_integrity(replica: ReplicaBase, group: BeamGroup) -> None:
    """Every running beam with a member has its own, and the leader has one.

    Raises:
        AssertionError: it is not so.
    """
    running = [member for member in group.beams if member is not None]
    assert {member.id for member in [*running, *group.parked]} == {member.id for member in group.members}
    assert len(running) + len(group.parked) == len(group.members) == group.width
    assert group.leader in running, "the leader has no beam"
    assert all(member.slot >= 0 and member.replica == replica.name for member in group.members)
    assert all(not member.blocks and not member.entered for member in group.parked)
    places = [beam for beam, member in enumerate(group.beams) if member is not None]
    assert [member.choice_index for member in running] == places
    assert 0 < group.num_missing <= len(group.beams)


def fork_from(replica: ReplicaBase, member: Sequence, source: Sequence, common: int) -> None:
    """Share the computed part of the first ``common`` tokens of ``source`` with ``member``, whose ``tokens`` are
    already set.

    A member that was another beam releases the blocks that the two do not share. Its partial block becomes a copy of
    the source's.
    """
    pool, table, each = replica.pool, replica.slots, replica.windowed_pages
    full, rest = divmod(common, replica.block_size)
    keep = 0
    if member.entered:
        own, pages = member.blocks[full:], member.windowed[full * each :]
        while keep < full and member.blocks[keep] == source.blocks[keep]:
            keep += 1
        pool.retain(source.blocks[keep:full] + source.windowed[keep * each : full * each])
        pool.release(reversed(member.blocks[keep:full] + member.windowed[keep * each : full * each]))
    else:
        pool.retain(source.blocks[:full] + source.windowed[: full * each])
        own, pages = replica.allocate(1 if rest and replica.num_free else 0)
        if not own:
            common -= rest  # there is no block to copy into: these tokens are computed again
    member.hold(source.blocks[:full] + own, source.windowed[: full * each] + pages, common)
    if own:
        copied = source.blocks[full : full + 1] + source.windowed[full * each : (full + 1) * each]
        member.copy_into(copied, own[:1] + pages[:each])
        pool.retain(copied)
    if replica.caching:
        source.extend_hashes(replica.block_size)
        member.share_hashes(source.hashes[:full])
    table.place(member, common)
    if member.entered:
        replica.builder.rewrite(member, keep if keep < full else len(member.blocks))


def candidates(replica: ReplicaBase, matched: ResultRows, result: StepResult) -> list[Candidates]:
    """The candidates of all beams in a result. Changes nothing.

    Raises:
        ProtocolError: some are missing.
    """
    table = replica.slots
    beams = np.flatnonzero(table.beam[matched.slots])
    if not len(beams):
        return []
    rows = beams if matched.running is None else np.flatnonzero(matched.running)[beams]
    places = np.searchsorted(result.logprob_rows, rows)
    ends = np.cumsum(result.top_counts)
    if not len(ends) or not np.array_equal(result.logprob_rows[np.minimum(places, len(ends) - 1)], rows):
        raise ProtocolError(f"step {result.step}: a beam has no candidates")
    if len(result.logprob_rows) != len(ends) or not ends[-1] == len(result.top_ids) == len(result.top_bits):
        raise ProtocolError(f"step {result.step}: the columns of log probabilities differ in length")
    found = []
    for slot, place in zip(matched.slots[beams].tolist(), places.tolist(), strict=True):
        member = table.at(slot)
        assert member.beam_group is not None
        count, end = member.beam_group.search.num_candidates, int(ends[place])
        if result.top_counts[place] != count:
            raise ProtocolError(
                f"step {result.step}: a beam has {int(result.top_counts[place])} candidates, not {count}"
            )
        found.append(Candidates(member, result.top_ids[end - count : end], result.top_bits[end - count : end]))
    return found
