"""Divides a step's token budget among running sequences, allocates blocks for it, and takes back what falls behind a
window."""

from __future__ import annotations

from itertools import compress

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.replica.plan_builder import decodes_first
from pagebus.actors.scheduler.replica.preemption import preempt
from pagebus.actors.scheduler.replica.prefill_pacing import prefill_of
from pagebus.actors.scheduler.replica.slots import Slots
from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.actors.scheduler.replica.step_time import Work
from pagebus.bus.messages import Int32Array

Shared = tuple[Slots, Int32Array, int]
"""A step's slots [rows], decodes first; the tokens that each computes [rows]; and the number of decodes."""
CHUNK_END_TOKENS = 1024
"""A chunk that does not finish its prompt ends at a multiple of this, where the next one begins: attention is fastest
over whole pieces (docs/attention.md)."""
LEAST_CHUNK_TOKENS = 4 * CHUNK_END_TOKENS
"""Smaller chunks are not shortened for that."""


def share_budget(replica: ReplicaBase, now_s: float, slots: Slots, behind: Int32Array) -> Shared:
    """Divide the budget: all decodes, then chunks of the other sequences, best first, while it lasts."""
    table, is_decode = replica.slots, behind == 1
    decodes, prompts = slots[is_decode], ~is_decode
    budget = replica.budget - len(decodes)
    wanted = dict(zip(slots[prompts].tolist(), behind[prompts].tolist(), strict=True))
    others = sorted(wanted, key=lambda each: table.at(each).key)
    whole = any(table.at(slot).least_tokens > 1 for slot in others)
    if replica.most_prompt_tokens is not None and not whole:
        budget = min(budget, replica.most_prompt_tokens)
    if replica.pacer is not None and len(decodes) and not whole:
        work = Work(decodes=len(decodes), decode_context=int(table.computed[decodes].sum()))
        prefills = [prefill_of(table.at(slot), int(table.computed[slot]), wanted[slot]) for slot in others]
        amounts = replica.pacer.share(now_s, work, prefills, budget)
    else:
        amounts = []
        for slot in others:
            amount = _chunk(int(table.computed[slot]), wanted[slot], budget)
            amounts.append(amount if amount >= table.at(slot).least_tokens else 0)
            budget -= amounts[-1]
    chosen = {slot: amount for slot, amount in zip(others, amounts, strict=True) if amount}
    rows = np.concatenate((decodes, np.fromiter(chosen, np.intp, len(chosen))))
    counts = np.ones(len(rows), np.int32)
    counts[len(decodes) :] = list(chosen.values())
    return rows, counts, len(decodes)


def _chunk(start: int, wanted: int, budget: int) -> int:
    """How many of the ``wanted`` tokens behind ``start`` others a step with room for ``budget`` computes."""
    if wanted <= budget or budget < LEAST_CHUNK_TOKENS:
        return min(wanted, budget)
    return budget - (start + budget) % CHUNK_END_TOKENS


def by_adapter(adapters: NDArray[np.int64], shared: Shared) -> Shared:
    """Bring rows with the same adapter next to each other, among decodes and among others. The executor multiplies such
    neighbours together; one by one they take several times as long."""
    slots, counts, num_decodes = shared
    numbers = adapters[slots]
    if not numbers.any():
        return shared
    decodes, others = numbers[:num_decodes].argsort(kind="stable"), numbers[num_decodes:].argsort(kind="stable")
    order = np.concatenate((decodes, others + num_decodes))
    return slots[order], counts[order], num_decodes


def allot_blocks(replica: ReplicaBase, slots: Slots, counts: Int32Array, num_decodes: int) -> Shared:
    """Allocate blocks for exactly the scheduled tokens. If they do not suffice, some rows get less or nothing."""
    table, size = replica.slots, replica.block_size
    missing = table.computed[slots] + counts
    if table.num_drafts:
        missing += table.ahead[slots]
    missing -= table.capacity[slots]
    rows = (missing > 0).nonzero()[0]
    if not len(rows):
        return slots, counts, num_decodes
    needed = -(-missing[rows] // size)
    total = int(needed.sum())
    if total * replica.num_pages > replica.pool.num_free:
        if table.num_drafts and replica.kept.num_tokens:  # what lies behind the window since drafts were accepted
            entered = [slot not in replica.bound for slot in slots.tolist()]  # copies come into the pages of others
            give_back_blocks(replica, slots[np.array(entered, np.bool_)])
        return preempt_for_blocks(replica, slots, counts)
    blocks, windowed = replica.allocate(total)
    short = slots[rows]
    table.capacity[short] += needed * size
    append, start, each = replica.builder.append, 0, replica.windowed_pages
    for slot, count in zip(short.tolist(), needed.tolist(), strict=True):
        end = start + count
        append(table.at(slot), blocks[start:end], windowed[start * each : end * each] if each else windowed)
        start = end
    return slots, counts, num_decodes


def preempt_for_blocks(replica: ReplicaBase, slots: Slots, counts: Int32Array) -> Shared:
    """Divide too few blocks: the best sequence takes what it needs, then the next.

    To advance by at least one token (by all, if it is computed in one step), a sequence preempts those behind it in the
    order, last first, but before them any that only waits for its last token. If there are none it keeps its blocks and
    waits. So the best sequence always advances, and there is no deadlock.
    """
    table, size = replica.slots, replica.block_size
    wanted = dict(zip(slots.tolist(), counts.tolist(), strict=True))
    behind = table.behind()
    order = table.occupied()
    heads = [each for each in order if each is each.head]
    needy = [each.beam_group is not None or bool(behind[each.slot]) for each in heads]
    victims = list(compress(heads, needy)) + [each for each, needs in zip(heads, needy, strict=True) if not needs]
    granted: dict[int, int] = {}
    for sequence in order:
        slot = sequence.slot
        if slot not in wanted:  # also when it has just been preempted: its slot is -1 then
            continue
        start, have = int(table.computed[slot] + table.ahead[slot]), int(table.capacity[slot])
        least = sequence.least_tokens
        while start + least > have + replica.num_free * size and victims[-1] is not sequence.head:
            preempt(replica, victims.pop())
        count = min(wanted[slot], have + replica.num_free * size - start)
        if count < least:
            continue
        blocks = max(0, -(-(start + count - have) // size))
        replica.builder.append(sequence, *replica.allocate(blocks))
        table.capacity[slot] += blocks * size
        granted[slot] = count
    rows = np.fromiter(granted, np.intp, len(granted))
    amounts = np.fromiter(granted.values(), np.int32, len(granted))
    is_decode = behind[rows] == 1
    first = decodes_first(is_decode)
    return rows[first], amounts[first], int(is_decode.sum())


def give_back_blocks(replica: ReplicaBase, slots: Slots) -> None:
    """Release the blocks of these just planned rows that no later query sees: those of layers with windows. Beams keep
    theirs.

    The next plan's first query is known as soon as a plan is made, so blocks outside its window are free at once, even
    with that plan and earlier ones in flight: plans are executed in order, and the next owner of a block writes it in a
    later one. Its place in the block table stays, and kernels never read it. Its content can be found until it is
    reused.
    """
    table = replica.slots
    first = replica.kept.first_blocks(table.computed[slots])
    passed = first > table.first[slots]
    if table.num_beams:
        passed &= ~table.beam[slots]
    rows = passed.nonzero()[0]
    if not len(rows):
        return
    slots, first = slots[rows], first[rows]
    table.first[slots] = first
    for slot, keep in zip(slots.tolist(), first.tolist(), strict=True):
        gone = table.at(slot).give_back(keep, replica.windowed_pages)
        replica.pool.release(reversed(gone))
        replica.counts.given_back(len(gone))
