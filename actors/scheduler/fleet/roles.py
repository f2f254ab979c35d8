"""Roles (``--roles``): some replicas compute long prompts, and others continue the sequences, so that no stream waits
for another's prompt.

A role only guides placement: any replica can do both, and does where roles would not help. The sequence gets its first
token where its prompt was computed. Then it moves to a slot of a decode replica, which pulls its blocks
(:mod:`pagebus.actors.scheduler.moves.pulls`). This follows DistServe (Zhong et al., 2024), but decides per sequence.
"""

from __future__ import annotations

import numpy as np

from pagebus.actors.scheduler.fleet.ahead import Ahead
from pagebus.actors.scheduler.fleet.fleet import Fleet, Rows
from pagebus.actors.scheduler.moves.link import Link
from pagebus.actors.scheduler.moves.pulls import Pulls
from pagebus.actors.scheduler.order import INTERACTIVE
from pagebus.actors.scheduler.replica.preemption import move_out
from pagebus.actors.scheduler.replica.prefix_match import blocks_for_others, offer_of
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence

LEAST_PREFILL_S = 0.025
"""Prompts that take less time are computed beside decodes, where streams hardly notice them. (1,100 tokens of an 8B
model on an H200.)"""
LEAST_BLOCKS = 2
"""Prompts of fewer blocks are computed beside decodes too: a prompt's last block is not full, and so cannot move."""
LEAST_LEFT = 16
"""A sequence with fewer tokens left ends where its prompt was computed."""
MOST_COST = 0.1
"""The longest wait for a move, as a share of the time in which the prompt is computed."""


class Roles:
    """Of the replicas that get plans, the first ``num_prefill`` by name are prefill replicas, if another is left for
    decodes; 0: there are no roles."""

    def __init__(self, num_prefill: int = 0) -> None:
        self._num_prefill = num_prefill
        self._fleet = Fleet()
        self._prefills: Rows = np.empty(0, np.bool_)
        self._decodes: Rows = np.empty(0, np.bool_)
        self._handed_over: dict[int, Sequence] = {}
        self._ahead = Ahead()
        self._least = 0.0
        self.is_on = False
        """Whether there is a replica of each role."""

    @property
    def num_prefill(self) -> int:
        """The number of prefill replicas, while there are enough others."""
        return self._num_prefill

    def set_prefills(self, num_prefill: int, fleet: Fleet) -> None:
        """Change the number of prefill replicas."""
        self._num_prefill = num_prefill
        self.assign(fleet)

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prompt with this many uncached tokens is a long one."""
        return num_tokens >= self._least

    def assign(self, fleet: Fleet) -> None:
        """Assign the roles again: the set of replicas has changed."""
        self._fleet = fleet
        live = sorted((row for row, each in enumerate(fleet.replicas) if not each.suspended), key=self._order)
        count = len(fleet.replicas)
        self._prefills, self._decodes = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self._prefills[live[: self._num_prefill]] = True
        self._decodes[live[self._num_prefill :]] = True
        cached = all(each.caching for each in fleet.replicas)  # what is pulled is found as what is cached
        self.is_on = cached and bool(self._prefills.any() and self._decodes.any())
        self._least = max(map(_least_tokens, fleet.replicas), default=0.0)
        for row, replica in enumerate(fleet.replicas):
            gives_way = self.is_on and bool(self._decodes[row])
            replica.limit_prompts(max(1, int(_least_tokens(replica))) if gives_way else None)

    def _order(self, row: int) -> tuple[int, str]:
        name = self._fleet.replicas[row].name
        return len(name), name  # executor-2 before executor-10

    def role(self, replica: Replica) -> str:
        """The replica's role: prefill or decode, or nothing without roles."""
        if not self.is_on:
            return ""
        row = self._fleet.row(replica.name)
        return "prefill" if self._prefills[row] else "decode" if self._decodes[row] else ""

    @property
    def decodes(self) -> Rows:
        """The replicas that continue sequences, if there are roles."""
        return self._decodes

    # -- where a sequence runs ----------------------------------------------------------------------------------------
    def narrow(self, sequence: Sequence, able: Rows, holds: Rows, pulls: Pulls) -> Rows:
        """Those of the ``able`` replicas whose role suits the sequence; none: it waits for one. All, if those that can
        hold it have another role."""
        rows = self._prefills if self._splits(sequence, able, pulls) else self._decodes
        return able & rows if (holds & rows).any() else able

    def _splits(self, sequence: Sequence, able: Rows, pulls: Pulls) -> bool:
        """Whether the next tokens of the sequence are computed on a prefill replica."""
        num_tokens = len(sequence.tokens)
        if num_tokens < self._least or sequence.beam_group is not None or sequence.swapped is not None:
            return False
        if not sequence.produced and not (able & self._prefills).any():
            return not self._is_paced  # perhaps; what is cached is looked up once there is room
        uncached = num_tokens - self._most_cached(sequence)
        return uncached >= self._least and self._pays(uncached, pulls) and not self._mixes(uncached)

    def _most_cached(self, sequence: Sequence) -> int:
        """The most tokens that a decode replica would find cached, or could pull."""
        fleet, most = self._fleet, 0
        for row in fleet.holders(sequence, self._decodes):
            offer = offer_of(fleet.replicas[row], sequence)
            most = max(most, offer.saved_tokens if offer is not None else 0)
        for row in fleet.lenders(sequence):
            replica = fleet.replicas[row]
            held = blocks_for_others(replica, sequence, hosts=bool(replica.kv_host)).num_blocks
            most = max(most, held * replica.block_size)
        return most

    def _pays(self, num_tokens: int, pulls: Pulls) -> bool:
        """Whether the blocks of a prompt would reach some decode replica quickly, as far as is known."""
        return any(
            pulls.can_lend(lender, target)
            and _move_tokens(num_tokens, lender, pulls.link(lender, target)) <= MOST_COST * num_tokens
            for lender in self._having(self._prefills)
            for target in self._having(self._decodes)
        )

    def _having(self, rows: Rows) -> list[Replica]:
        return [self._fleet.replicas[row] for row in np.flatnonzero(rows).tolist()]

    @property
    def _is_paced(self) -> bool:
        return any(replica.pacer is not None for replica in self._having(self._decodes))

    def _mixes(self, num_tokens: int) -> bool:
        """Whether decode replicas would compute the prompt sooner and still keep ``--itl-target-ms``: it fits into one
        of their steps, or the least loaded of them has less to do than any prefill replica."""
        if not self._is_paced:
            return False
        load = self._fleet.load[INTERACTIVE]
        fits = any(each.pacer is not None and each.pacer.tried >= num_tokens for each in self._having(self._decodes))
        return fits or bool(load[self._prefills].min() > load[self._decodes].min())

    # -- during the prompt --------------------------------------------------------------------------------------------
    def sent_ahead(self, replica: Replica, pulls: Pulls) -> list[tuple[Sequence, Replica]]:
        """If this is a prefill replica, sequences in the middle of their prompts, each with the decode replica that is
        to pull what its last plan computes of them."""
        if not self._prefills[self._fleet.row(replica.name)]:
            return []
        targets = [each for each in self._having(self._decodes) if pulls.can_lend(replica, each)]
        return self._ahead.due(replica, targets, self._fleet)

    # -- after the prompt ---------------------------------------------------------------------------------------------
    def hand_over(self, replica: Replica, pulls: Pulls) -> bool:
        """If this is a prefill replica, take sequences off it that get a token by its last plan, as far as decode
        replicas have room. They are added to its ``preempted``. Returns whether there are any."""
        if not self._prefills[self._fleet.row(replica.name)]:
            return False
        table = replica.slots
        done = (table.ids != 0) & (table.computed >= table.known) & (table.last - table.known >= LEAST_LEFT)
        if not done.any():
            return False
        self._fleet.refresh()
        before = len(self.on_their_way())
        for slot in done.nonzero()[0].tolist():
            sequence = table.at(slot)
            if not self._may_move(sequence):
                continue
            if not self._has_room(replica, sequence, pulls):
                break
            self._handed_over[sequence.id] = sequence
            move_out(replica, sequence)
        return len(self._handed_over) > before

    def _may_move(self, sequence: Sequence) -> bool:
        """Whether the sequence may run elsewhere with cached tokens."""
        return sequence.entered and sequence.beam_group is None and not sequence.scores_prompt

    def _has_room(self, lender: Replica, sequence: Sequence, pulls: Pulls) -> bool:
        """Whether decode replicas have a slot and blocks for the sequence, besides those that are on their way."""
        needed = self._fleet.blocks_needed(sequence)
        queued = list(self._handed_over.values())
        taken = sum(map(self._fleet.blocks_needed, queued))
        targets = [each for each in self._having(self._decodes) if pulls.can_lend(lender, each)]
        room = sum(int(self._fleet.room[self._fleet.row(each.name)]) for each in targets)
        return room >= taken + needed and sum(each.slots.num_free_slots for each in targets) > len(queued)

    def on_their_way(self) -> set[int]:
        """Ids of sequences that have left a prefill replica, where their last step may be in flight, and have no slot
        yet."""
        self._handed_over = {number: each for number, each in self._handed_over.items() if each.is_queued}
        return set(self._handed_over)


def _least_tokens(replica: Replica) -> float:
    """The fewest uncached tokens of a long prompt."""
    return max(LEAST_PREFILL_S * replica.prompt_rate.tokens_per_s, LEAST_BLOCKS * replica.block_size)


def _move_tokens(num_tokens: int, lender: Replica, link: Link) -> float:
    """Tokens that a device could compute while a sequence waits for the move of its prompt. The results of earlier
    steps move while later ones run, so it waits for the part of the last step, or for what the link is behind."""
    last = min(num_tokens, lender.budget)
    whole, part = (link.cost_tokens(count // lender.block_size * lender.num_pages) for count in (num_tokens, last))
    return max(part, whole - (num_tokens - last))
