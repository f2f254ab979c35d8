"""Takes slot and blocks from a running sequence: for want of blocks, because its client is away, or because it ends."""

from __future__ import annotations

from pagebus.actors.scheduler.replica.moves.leaver import Leaver
from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.actors.scheduler.request import Sequence
from pagebus.actors.scheduler.states import State


def preempt(replica: ReplicaBase, sequence: Sequence, *, parked: bool = False) -> None:
    """Take slot and blocks away, for want of blocks or because its client left (``parked``, counted apart).

    The tokens are kept. They are computed again later, unless the sequence continues elsewhere with blocks pulled from
    here, or the host tier keeps the blocks. A sequence that only waits for its last token needs neither. Of a beam
    search the leader's tokens are kept; other beams resume from the part that they share with it.
    """
    slot, table = sequence.slot, replica.slots
    num_computed = int(table.computed[slot])
    if sequence.beam_group is not None:  # the last token's step is done again, for its candidates
        num_computed = min(num_computed, int(table.known[slot]) - 1)
        if sequence.copied is not None:
            num_computed -= num_computed % replica.block_size  # the rest is not copied yet
    if sequence.entered:
        returns, num_listed = 0 < num_computed < table.last[slot], int(table.indexed[slot])
        goes = returns and not parked and _goes_elsewhere(replica, sequence, num_computed, num_listed)
        swaps = returns and not goes and replica.host_tier.swap_out(sequence, num_computed, num_listed)
        if parked:
            replica.counts.parked()
        else:
            replica.counts.preempted(swaps=swaps, goes=goes)
            sequence.request.was_preempted()
    _to_queue(replica, sequence)


def _goes_elsewhere(replica: ReplicaBase, sequence: Sequence, num_computed: int, num_listed: int) -> bool:
    """Whether another replica takes the sequence over, because that is quicker than returning here."""
    if replica.goes_elsewhere is None:
        return False
    cost_tokens = replica.host_tier.cost_of_return(sequence, num_computed, num_listed)
    num_full = min(num_listed * replica.block_size, num_computed)
    leaver = Leaver(sequence, num_computed, num_full, len(sequence.pages), cost_tokens)
    return cost_tokens > 0 and replica.goes_elsewhere(replica.name, leaver)


def move_out(replica: ReplicaBase, sequence: Sequence) -> None:
    """Take slot and blocks away because the executor drains, or the sequence continues elsewhere. Its cached blocks may
    be pulled from here."""
    _to_queue(replica, sequence)


def _to_queue(replica: ReplicaBase, sequence: Sequence) -> None:
    _leave_slot(replica, sequence)
    if sequence.last_step <= replica.step_results.last_step:
        sequence.become(sequence.at_rest)
    else:
        sequence.become(State.PREEMPTED_IN_FLIGHT)
        replica.step_results.hold(sequence)
    replica.preempted.append(sequence)


def give_back(replica: ReplicaBase, sequence: Sequence) -> None:
    """Return the sequence to the queue for a slot elsewhere. No more results arrive for it."""
    _leave_slot(replica, sequence)
    sequence.become(sequence.at_rest)


def end(replica: ReplicaBase, sequence: Sequence) -> None:
    """End the sequence."""
    _leave_slot(replica, sequence)
    sequence.become(State.ENDED)


def _leave_slot(replica: ReplicaBase, sequence: Sequence) -> None:
    """Release slot and blocks of the sequence and its beams, which have their adapter together. All beams but the
    leader end."""
    if sequence.beam_group is not None:
        last_steps = [int(replica.slots.planned[member.slot]) for member in sequence.beam_group.members]
        for member in sequence.beam_group.members:
            _vacate(replica, member)
            if member is not sequence:
                member.become(State.ENDED)
        sequence.leave_slot(max(last_steps))
        sequence.beam_group.disband()
        del replica.searches[sequence.id]
    else:
        _vacate(replica, sequence)
    if sequence.request.adapter is not None:
        replica.adapters.leave(sequence.request.digest)


def _vacate(replica: ReplicaBase, sequence: Sequence) -> None:
    if sequence.entered:
        replica.builder.freed_slots.append(sequence.slot)
        replica.builder.forget(sequence)
    else:
        del replica.bound[sequence.slot]
        replica.host_tier.cancel(sequence.slot)
    replica.drop_source(sequence)
    replica.slots.leave(sequence)
    replica.pool.release(reversed(sequence.pages))
    sequence.release()
    sequence.belong_to(None)
