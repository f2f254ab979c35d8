"""The adapters of one replica: which its executor has in memory, and which of these are in blocks of the device.

An adapter is wanted, then read beside the steps, then known: its executor has it in host memory, and has reported how
many blocks it takes. Only then does a sequence with it get a slot, and the adapter its blocks, from the pool that keys
and values come from. While sequences use the adapter, it holds its blocks. Afterwards they are free and listed like
cached ones. The next sequence finds them unless they were reallocated: least recently used blocks go first, whatever
they hold. An adapter that has lost a block is copied from the host again.

At most ``--max-loras`` adapters are used by sequences at a time, and the executor holds ``--max-cpu-loras``.

Each rank of an executor reads its part. The adapter is known once all ranks have reported it, and dropped on all if one
cannot read it. So every rank holds the same adapters, in the same blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagebus.actors.scheduler.kv.block_pool import BlockPool
from pagebus.actors.scheduler.kv.prefix_index import PrefixIndex, adapter_keys, adapter_of
from pagebus.bus.messages import AdapterPlaced, AdapterRead, AdapterSource


@dataclass(slots=True)
class _Reading:
    """An adapter that is being read: the plan that loads it (0: the next one), and by rank its report, "" or an
    error."""

    name: str
    step: int = 0
    num_blocks: int = 0
    told: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    """An adapter in host memory. ``pages``: its blocks, also if the next plan fills them; None: it has none."""

    name: str
    num_blocks: int
    pages: list[int] | None = None
    num_sequences: int = 0


class Adapters:
    """Adapters of sequences in slots, ``capacity`` at a time, in blocks of ``pool``; ``most`` in the memory of each of
    ``ranks``. ``loaded`` and ``dropped`` are for the next plan."""

    def __init__(self, capacity: int, pool: BlockPool, index: PrefixIndex, *, most: int = 0, ranks: int = 1) -> None:
        self.capacity, self.most, self._ranks = capacity, max(capacity, most), ranks
        self.loaded: list[AdapterSource] = []
        self.dropped: list[str] = []
        self.num_in_use = 0
        """Adapters that sequences in slots use."""
        self._pool, self._index = pool, index
        self._placed: dict[str, list[int]] = {}
        """By digest, the blocks that the next plan copies it into."""
        self._known: dict[str, _Known] = {}
        """By digest, most recently used last."""
        self._reading: dict[str, _Reading] = {}
        """By digest."""
        if capacity:
            pool.tell_losses(self._lose)

    # -- what there is -------------------------------------------------------------------------------------------------
    @property
    def resident(self) -> list[tuple[str, list[int]]]:
        """All on the device, most recently used last: the name under which each was first requested, and its blocks."""
        return [(each.name, each.pages) for each in self._known.values() if each.pages is not None]

    @property
    def num_held(self) -> int:
        """Blocks of the adapters that sequences use."""
        return sum(each.num_blocks for each in self._known.values() if each.num_sequences)

    def held_blocks(self) -> list[int]:
        """The blocks of the adapters that sequences use."""
        return [block for each in self._known.values() if each.num_sequences for block in each.pages or ()]

    def is_known(self, digest: str) -> bool:
        """Whether the executor has it in memory."""
        return digest in self._known

    def is_read(self, digest: str) -> bool:
        """Whether it is being read: the executor will report it, or an error."""
        return digest in self._reading

    def may_run(self, digest: str) -> bool:
        """Whether one more sequence may have it, if there are blocks for both."""
        known = self._known.get(digest)
        return known is not None and (known.num_sequences > 0 or self.num_in_use < self.capacity)

    def num_blocks(self, digest: str) -> int:
        """The number of blocks that it takes; 0 while that is unknown."""
        known = self._known.get(digest)
        return 0 if known is None else known.num_blocks

    def num_needed(self, digest: str) -> int:
        """The number of free blocks that it takes when a sequence with it gets a slot."""
        known = self._known.get(digest)
        return 0 if known is None or known.num_sequences else known.num_blocks

    # -- use -----------------------------------------------------------------------------------------------------------
    def use(self, digest: str) -> None:
        """A sequence with it gets a slot. :meth:`num_needed` blocks are free."""
        known = self._known[digest] = self._known.pop(digest)
        if not known.num_sequences:
            self.num_in_use += 1
            if known.pages is None:
                known.pages = self._placed[digest] = self._pool.allocate(known.num_blocks)
                self._list(digest, known.pages)
            else:
                self._pool.retain(known.pages)
        known.num_sequences += 1

    def leave(self, digest: str) -> None:
        """A sequence with it has left its slot."""
        known = self._known[digest]
        known.num_sequences -= 1
        if not known.num_sequences:
            self.num_in_use -= 1
            self._pool.release(reversed(known.pages or ()))

    def want(self, adapter: AdapterSource, kept: Collection[str] = ()) -> bool:
        """Have the next plan load an adapter, if necessary in place of one that is neither used nor ``kept``. False if
        there is no such adapter."""
        if len(self._known) + len(self._reading) >= self.most:
            idle = (digest for digest, each in self._known.items() if not each.num_sequences and digest not in kept)
            digest = next(idle, None)
            if digest is None:
                return False
            self._lose(digest)
            del self._known[digest]
            self.dropped.append(digest)
        self._reading[adapter.digest] = _Reading(adapter.name)
        self.loaded.append(adapter)
        return True

    def _list(self, digest: str, blocks: list[int]) -> None:
        for key, block in zip(adapter_keys(digest, len(blocks)), blocks, strict=True):
            self._index.insert(key, block)

    def _lose(self, digest: str) -> None:
        """An unused adapter is not on the device any more."""
        known = self._known[digest]
        self._index.forget(known.pages or ())
        known.pages = None
        self._placed.pop(digest, None)

    def list_again(self) -> None:
        """List the used adapters again after the index was emptied; the others have lost their blocks."""
        for digest, known in self._known.items():
            if known.pages is not None and known.num_sequences:
                self._list(digest, known.pages)
            else:
                known.pages = None
                self._placed.pop(digest, None)

    # -- plans and reports ---------------------------------------------------------------------------------------------
    @property
    def has_news(self) -> bool:
        """Whether the next plan has anything to say about adapters."""
        return bool(self.loaded or self.dropped or self._placed)

    def columns(self) -> dict[str, Any]:
        """The fields of the next :class:`StepPlan` about adapters."""
        if not self.has_news:
            return {}
        placed = tuple(AdapterPlaced(digest=each, num_blocks=len(pages)) for each, pages in self._placed.items())
        return {
            "loaded_adapters": tuple(self.loaded),
            "dropped_adapters": tuple(self.dropped),
            "placed_adapters": placed,
            "adapter_blocks": np.array([page for pages in self._placed.values() for page in pages], np.int32),
        }

    def planned(self, step: int) -> None:
        """This plan carries the fields of :meth:`columns`."""
        for adapter in self.loaded:
            self._reading[adapter.digest].step = step
        self.loaded, self.dropped, self._placed = [], [], {}

    def take(self, read: AdapterRead) -> str:
        """Apply a rank's report. Returns the error of the first rank that has one, once all have reported; otherwise
        ""."""
        reading = self._reading.get(read.digest)
        if reading is None or reading.step != read.step:
            return ""
        reading.told[read.rank] = read.error
        reading.num_blocks = max(reading.num_blocks, read.num_blocks)
        if len(reading.told) < self._ranks:
            return ""
        del self._reading[read.digest]
        failed = min((rank for rank, error in reading.told.items() if error), default=None)
        if failed is None:
            self._known[read.digest] = _Known(reading.name, reading.num_blocks)
            return ""
        if not all(reading.told.values()):
            self.dropped.append(read.digest)  # it is there on some
        return f"rank {failed}: {reading.told[failed]}" if failed else reading.told[failed]

    def check_integrity(self, in_use: Iterable[str]) -> None:
        """``in_use`` names the adapter of each sequence in a slot, "" for none. Counts, blocks and index agree with it.

        Raises:
            AssertionError: they do not.
        """
        expected = Counter(digest for digest in in_use if digest)
        counted = {digest: each.num_sequences for digest, each in self._known.items() if each.num_sequences}
        assert counted == dict(expected), f"sequences with adapters: {dict(expected)}, counted {counted}"
        assert self.num_in_use == len(counted) <= self.capacity
        assert not self._known.keys() & self._reading.keys()
        assert len(self._known) + len(self._reading) <= self.most
        listed = dict[bytes, int]()
        for digest, each in self._known.items():
            assert each.pages is not None or not each.num_sequences, f"adapter {digest} has sequences, but no blocks"
            assert digest not in self._placed or self._placed[digest] is each.pages
            if each.pages is not None:
                assert len(each.pages) == each.num_blocks
                listed |= dict(zip(adapter_keys(digest, each.num_blocks), each.pages, strict=True))
        found = {key: block for key, block in self._index.blocks.items() if adapter_of(key) is not None}
        assert found == listed, "blocks of adapters are not listed as they lie"
        assert self._placed.keys() <= self._known.keys()
