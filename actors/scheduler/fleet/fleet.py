"""Load and room of all replicas as arrays, one row per replica, so that placing a request costs no call per replica.

A row is recomputed only after its replica has changed. Code that changes a replica calls :meth:`Fleet.touch`, which
also marks the replica as one that may have something new to plan.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.model.window import EVERYTHING
from pagebus.actors.scheduler.kv.prefix_directory import PrefixDirectory
from pagebus.actors.scheduler.order import INTERACTIVE, JOB
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence

Rows = NDArray[np.bool_]
"""A mask over the replicas [n]."""
_CLASSES = (INTERACTIVE, JOB)
ANY = 2**31 - 1
"""More tokens, or blocks, than any sequence has."""


def _capacity(replica: Replica) -> int:
    """Tokens that a sequence alone can reach; all, if the blocks suffice for a window."""
    window, num_blocks, each = replica.window, replica.pool.num_blocks, replica.windowed_pages
    if each:  # all pages of the one kind beside the window's of the other, or of both kinds alike
        num_blocks = max(num_blocks // (1 + each), num_blocks - each * replica.windowed.most_blocks(1))
    return ANY if window.num_tokens and window.most_blocks(1) <= num_blocks else num_blocks * replica.block_size


def _most_admitted(replica: Replica) -> int:
    """Blocks that any sequence but beams waits for at most (:meth:`Replica.blocks_to_admit`)."""
    window, num_blocks = replica.window, replica.pool.num_blocks
    return min(window.most_blocks(replica.budget), num_blocks) if window.num_tokens else ANY


class Fleet:
    """n replicas in the order in which they joined.

    ``load`` [2, n] and ``open`` [2, n] by priority class, and ``room`` [n], hold :meth:`Replica.load`,
    :meth:`Replica.is_open` and :meth:`Replica.room` as of the last :meth:`refresh`, and ``free`` [n] whether there is a
    free slot. ``due``: rows touched since the core last planned.
    """

    def __init__(self, replicas: Iterable[Replica] = (), prefix_directory: PrefixDirectory | None = None) -> None:
        self.replicas = list(replicas)
        self.prefix_directory = PrefixDirectory() if prefix_directory is None else prefix_directory
        self._rows = {replica.name: row for row, replica in enumerate(self.replicas)}
        count = len(self.replicas)
        self.load = np.zeros((len(_CLASSES), count), np.int64)
        self.open = np.zeros((len(_CLASSES), count), np.bool_)
        self.room = np.zeros(count, np.int64)
        self.free = np.zeros(count, np.bool_)
        self._max_model_len = np.array([each.max_model_len for each in self.replicas], np.int64)
        self._capacity = np.array([_capacity(each) for each in self.replicas], np.int64)
        self._window = self.replicas[0].window if self.replicas else EVERYTHING
        self._most_admitted = min(map(_most_admitted, self.replicas), default=0)
        self._device = [each.index.blocks for each in self.replicas]
        self._host = [each.host_tier.pool.index.blocks for each in self.replicas]
        self._disk = {row: each.disk_tier for row, each in enumerate(self.replicas) if each.disk_tier.is_on}
        self._lenders = [row for row, each in enumerate(self.replicas) if each.kv_address]
        self.lends = len(self._lenders) > 1
        """Whether blocks may be pulled from one by another."""
        self._on_host: dict[str, list[Replica]] = {}
        for each in self.replicas:
            if each.kv_host:
                self._on_host.setdefault(each.kv_host, []).append(each)
        self.lends_hosts = self.lends and bool(self._on_host)
        """Whether they may be pulled from host tiers, too."""
        self.due = set(range(count))
        self._stale = set(range(count))

    @property
    def with_disks(self) -> list[Replica]:
        """The replicas that have a disk tier."""
        return [self.replicas[row] for row in self._disk]

    def neighbours(self, replica: Replica) -> list[Replica]:
        """The replicas whose host tiers one can read, itself among them."""
        return self._on_host.get(replica.kv_host, [])

    def row(self, name: str) -> int:
        """The row of a replica."""
        return self._rows[name]

    def named(self, name: str) -> Replica:
        """The replica of this name."""
        return self.replicas[self._rows[name]]

    def touch(self, replica: Replica) -> None:
        """Mark a replica as changed: its row is recomputed, and it may have something to plan."""
        row = self._rows.get(replica.name)
        if row is not None:
            self.due.add(row)
            self._stale.add(row)

    def outdate(self, replica: Replica) -> None:
        """Mark a replica as changed, but with nothing new to plan."""
        self._stale.add(self._rows[replica.name])

    def changed(self) -> list[Replica]:
        """The replicas in ``due``."""
        return [self.replicas[row] for row in sorted(self.due)]

    def take_due(self) -> list[Replica]:
        """The replicas in ``due``, which is empty afterwards."""
        changed, self.due = self.changed(), set()
        return changed

    def refresh(self) -> None:
        """Recompute the rows of changed replicas."""
        for row in self._stale:
            replica = self.replicas[row]
            self.room[row] = replica.room()
            self.free[row] = replica.slots.has_free_slot and not replica.suspended
            self.load[:, row] = replica.load(JOB)
            self.open[:, row] = replica.is_open(JOB)
            for block_hash in replica.index.new_anchors:
                self.prefix_directory.add(block_hash, replica.name)
            replica.index.new_anchors.clear()
            if replica.slots.num_jobs or replica.pacer is not None:
                self.load[INTERACTIVE, row] = replica.load(INTERACTIVE)
                self.open[INTERACTIVE, row] = replica.is_open(INTERACTIVE)
        self._stale.clear()
        self.prefix_directory.sweep(self._lists)

    def can_hold(self, sequence: Sequence) -> Rows:
        """Replicas on which the sequence could run alone up to its limit (:meth:`Replica.can_hold`)."""
        if sequence.beam_group is not None or sequence.request.adapter is not None:
            return np.array([replica.can_hold(sequence) for replica in self.replicas], np.bool_)
        num_tokens = np.minimum(self._max_model_len, sequence.limit) - 1
        fits: Rows = (num_tokens >= len(sequence.tokens)) & (num_tokens <= self._capacity)
        return fits

    def holders(self, sequence: Sequence, rows: Rows) -> list[int]:
        """The ``rows`` that may already hold tokens of the sequence: cached, swapped out, or computed for the same
        request."""
        holders: list[int] = []
        if self.replicas[0].caching:
            sequence.extend_hashes(self.replicas[0].block_size)
        if sequence.hashes:
            found = sorted(self._rows[name] for name in self._listing(sequence))
            holders = [row for row in found if rows[row]]
            holders += [row for row in self._storing(sequence) if rows[row] and row not in holders]
        known = sequence.swapped.replica if sequence.swapped is not None else None
        for name in (known, sequence.leader.replica if sequence.leader is not None else None):
            row = self._rows.get(name) if name is not None else None
            if row is not None and rows[row] and row not in holders:
                holders.append(row)
        return holders

    def lenders(self, sequence: Sequence) -> list[int]:
        """The rows that may have tokens of the sequence on their devices and can lend them."""
        if not self.replicas[0].caching:
            return []
        sequence.extend_hashes(self.replicas[0].block_size)
        if not sequence.hashes:
            return []
        found = self._listing(sequence)
        return [row for row in self._lenders if self.replicas[row].name in found]

    def _listing(self, sequence: Sequence) -> set[str]:
        """Replicas that list one of the sequence's anchors (:class:`PrefixIndex`)."""
        anchors = self._anchors(sequence)
        return {name for anchor in anchors for name in self.prefix_directory.find(anchor, self._lists)}

    def _storing(self, sequence: Sequence) -> list[int]:
        """Rows of replicas that have one of them on a disk."""
        if not self._disk:
            return []
        anchors = self._anchors(sequence)
        return [row for row, tier in self._disk.items() if any(map(tier.has, anchors))]

    def _anchors(self, sequence: Sequence) -> list[bytes]:
        every = self._window.num_matched if not sequence.keeps_all else 0
        return sequence.hashes[::every] if every else sequence.hashes[:1]

    def blocks_needed(self, sequence: Sequence) -> int:
        """Blocks without which the sequence gets no slot where nothing is cached; perhaps a few less."""
        every = -(-len(sequence.tokens) // self.replicas[0].block_size)
        return every if sequence.keeps_all else min(every, self._most_admitted)

    def lists(self, row: int, block_hash: bytes) -> bool:
        """Whether the replica in this row caches a block in any tier."""
        tier = self._disk.get(row)
        return self._has(row, block_hash) or (tier is not None and tier.has(block_hash))

    def _has(self, row: int, block_hash: bytes) -> bool:
        if block_hash in self._device[row] or block_hash in self._host[row]:
            return True
        return self.replicas[row].index.find(block_hash) is not None  # what is still to be listed, too

    def _lists(self, name: str, block_hash: bytes) -> bool:
        row = self._rows.get(name)
        return row is not None and self._has(row, block_hash)

    def check_integrity(self) -> None:
        """Rows that are not stale equal their replicas' figures, and cached first blocks are in the prefix directory.

        Raises:
            AssertionError: one is not.
        """
        for row, replica in enumerate(self.replicas):
            for sequence in replica.slots.occupied():
                first = sequence.hashes[0] if sequence.hashes else b""
                known = first in replica.index.new_anchors or replica.name in self.prefix_directory.find(
                    first, self._lists
                )
                assert known or not self._has(row, first), f"{replica.name}: a first block is not found"
            if row in self._stale:
                continue
            assert self.room[row] == replica.room(), f"{replica.name}: room is out of date"
            free = replica.slots.has_free_slot and not replica.suspended
            assert self.free[row] == free, f"{replica.name}: free slots are out of date"
            for priority_class in _CLASSES:
                assert self.load[priority_class, row] == replica.load(priority_class), (
                    f"{replica.name}: load is out of date"
                )
                assert self.open[priority_class, row] == replica.is_open(priority_class), (
                    f"{replica.name}: open is out of date"
                )
