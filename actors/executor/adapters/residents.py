"""The adapters that an executor holds: what plans load, place and drop, and which slots have which.

The device thread calls :meth:`Residents.apply` for each plan. Files are read in threads of their own, into host memory.
From there an adapter is copied into the blocks that a plan names, as blocks of the host tier are
(:mod:`pagebus.actors.executor.memory.swap`).
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pagebus.actors.executor.adapters.images import Image
from pagebus.actors.executor.adapters.places import Places
from pagebus.actors.executor.adapters.reading import Read, reader
from pagebus.actors.executor.device.errors import PlanError
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.adapted.slots import AdapterSlots
from pagebus.actors.executor.memory.block_loads import BlockLoad, Loads
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.executor.models.network import Network
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.messages import AdapterRead, AdapterSource, Int32Array, StepPlan
from pagebus.bus.messages.field_types import no_ints

MOST_HELD = 1024
"""Each has a row in the tables of all products; beyond these, adapters in host memory are there to be loaded again."""
READERS = 4
"""Adapters that are read at a time, each by a thread that keeps a processor busy."""


class Wanted(NamedTuple):
    """Which plan wants an adapter: an answer names it, for another plan may want the same one later."""

    scheduler_epoch: int
    step: int


class Residents:
    """The adapters of one executor, by digest. ``tell`` is called from any thread.

    ``num_host``: how many are kept in host memory, those that the scheduler counts on included.
    """

    def __init__(
        self, places: Places, slots: AdapterSlots, read: Read, num_host: int, tell: Callable[[AdapterRead], None]
    ) -> None:
        self.slots, self.places = slots, places
        self._read, self._tell = read, tell
        self._num_host = num_host
        self._held: dict[str, Image] = {}
        """What the scheduler counts on."""
        self._rows: dict[str, int] = {}
        """Of those that have been placed, their rows in the tables."""
        self._blocks: dict[str, Int32Array] = {}
        self._wanted: dict[str, Wanted] = {}
        self._read_by_now: queue.SimpleQueue[tuple[str, Wanted, Image | None]] = queue.SimpleQueue()
        self._host: OrderedDict[str, Image] = OrderedDict()
        """All in host memory, the one used longest ago first."""
        self._to_read: deque[tuple[AdapterSource, Wanted]] = deque()
        self._num_readers = 0
        self._reading = threading.Lock()
        """For these two."""
        self._epoch = 0

    def apply(self, plan: StepPlan, scheduler_epoch: int) -> Loads:
        """Follow a plan, before its pass. Returns what has to be copied for it.

        Raises:
            PlanError: it uses an adapter that is not there, or loads more than there may be.
        """
        if scheduler_epoch != self._epoch:  # a new scheduler counts on nothing
            self._epoch = scheduler_epoch
            for each in (self._held, self._rows, self._blocks, self._wanted):
                each.clear()
            self.slots.of_slot.fill(-1)
        self._settle()
        for digest in plan.dropped_adapters:
            for each in (self._held, self._rows, self._blocks):
                each.pop(digest, None)
        for source in plan.loaded_adapters:
            self._load(source, Wanted(scheduler_epoch, plan.step))
        loads = self._place(plan) if plan.placed_adapters else []
        self.slots.of_slot[plan.freed_slots] = -1
        needed = []
        for new in plan.new_sequences:
            if new.adapter and new.adapter not in self._rows:
                raise PlanError(f"sequence {new.sequence_id} has adapter {new.adapter}, which is not on the device")
            self.slots.of_slot[new.slot] = self._rows[new.adapter] if new.adapter else -1
            if new.adapter:
                needed.append(self._blocks[new.adapter])
        return Loads(loads, np.concatenate(needed) if needed else no_ints())

    def _load(self, source: AdapterSource, wanted: Wanted) -> None:
        if len(self._held) + len(self._wanted) >= self.places.count:
            raise PlanError(f"adapter {source.digest} is one more than there may be")
        known = self._host.get(source.digest)
        if known is None:
            self._wanted[source.digest] = wanted
            with self._reading:
                self._to_read.append((source, wanted))
                begins = self._num_readers < READERS
                self._num_readers += begins
            if begins:
                threading.Thread(target=self._fetch_all, name="adapter", daemon=True).start()
            return
        self._hold(source.digest, known)
        self._tell(self._answer(source.digest, wanted, known))

    def _fetch_all(self) -> None:
        """Read adapters, in a thread of its own, until there are no more."""
        while (found := self._next()) is not None:
            self._fetch(*found)

    def _next(self) -> tuple[AdapterSource, Wanted] | None:
        with self._reading:
            if self._to_read:
                return self._to_read.popleft()
            self._num_readers -= 1
            return None

    def _fetch(self, source: AdapterSource, wanted: Wanted) -> None:
        """Read an adapter, and say so."""
        adapter: Image | None = None
        error = ""
        try:
            adapter = self.places.image(self._read(source))
        except Exception as problem:  # whatever a file may bring about ends a request, not the executor
            error = str(problem) if isinstance(problem, AdapterError) else f"{type(problem).__name__}: {problem}"
        self._read_by_now.put((source.digest, wanted, adapter))
        self._tell(self._answer(source.digest, wanted, adapter, error))

    def _settle(self) -> None:
        """Hold what has been read, if it is still wanted."""
        while not self._read_by_now.empty():
            digest, wanted, adapter = self._read_by_now.get()
            is_wanted = self._wanted.get(digest) == wanted
            if is_wanted:
                del self._wanted[digest]
            if adapter is not None and is_wanted:
                self._hold(digest, adapter)
            elif adapter is not None:
                self._keep(digest, adapter)

    def _hold(self, digest: str, adapter: Image) -> None:
        """The scheduler counts on it."""
        self._held[digest] = adapter
        self._keep(digest, adapter)

    def _keep(self, digest: str, adapter: Image) -> None:
        """In host memory, for its return."""
        self._host[digest] = adapter
        self._host.move_to_end(digest)
        while len(self._host) > self._num_host:
            self._host.popitem(last=False)

    def _place(self, plan: StepPlan) -> list[BlockLoad]:
        """Adapters come to blocks."""
        loads, first = list[BlockLoad](), 0
        for each in plan.placed_adapters:
            adapter = self._held.get(each.digest)
            blocks = plan.adapter_blocks[first : first + each.num_blocks]
            first += each.num_blocks
            if adapter is None or len(blocks) < self.places.num_blocks(adapter):
                raise PlanError(f"adapter {each.digest} is not in memory, or has too few blocks")
            used = set(self._rows.values())
            row = self._rows.get(each.digest)
            if row is None:
                row = next(row for row in range(self.places.count) if row not in used)
            self._rows[each.digest], self._blocks[each.digest] = row, blocks
            self._keep(each.digest, adapter)
            loads += self.places.place(row, adapter, blocks)
        return loads

    def _answer(self, digest: str, wanted: Wanted, adapter: Image | None, error: str = "") -> AdapterRead:
        """Which replica says so is for its actor to add."""
        return AdapterRead(
            replica="", executor_epoch=0, scheduler_epoch=wanted.scheduler_epoch, step=wanted.step, digest=digest,
            error=error, num_blocks=0 if adapter is None else self.places.num_blocks(adapter),
        )  # fmt: skip


def most_held(settings: Settings) -> int:
    """Adapters that the scheduler may count on at a time."""
    return max(settings.max_loras, min(settings.num_host_loras, MOST_HELD))


def make_residents(
    settings: Settings, network: Network, ops: Ops, most_samples: int, block_bytes: int,
    tell: Callable[[AdapterRead], None],
) -> Residents | None:  # fmt: skip
    """``most_samples``: the most tokens that a step samples; ``block_bytes``: of the cache. None where
    adapters are not enabled.

    Raises:
        SettingsError: the model only pools, or blocks are too small.
    """
    if not settings.enable_lora:
        return None
    config = network.config
    if not isinstance(network, Decoder) or config.pooler is not None:
        raise SettingsError(f"--enable-lora: {config.architecture} is served without adapters")
    targets = settings.lora_target_modules
    places = Places(network, most_held(settings), settings.max_lora_rank, block_bytes, targets)
    read = reader(network.config, settings.max_lora_rank, network.parameters.dtype, targets)
    device = network.parameters.device
    slots = AdapterSlots(
        network.adapters, ops, settings.max_num_seqs + 1, most_samples, device, adapt_heads=places.adapt_heads
    )
    return Residents(places, slots, read, settings.num_host_loras, tell)
