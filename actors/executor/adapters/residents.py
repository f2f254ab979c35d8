"""The adapters that an executor holds: what plans load and drop, and which slots have which.

The device thread calls :meth:`Residents.apply` for each plan. Files are read in threads of their own. What has been
read is put into its place by the device thread, before the next plan: a plan that uses it is written later, because the
scheduler waits for the :class:`AdapterRead`.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from pagebus.actors.executor.adapters.images import Image
from pagebus.actors.executor.adapters.places import Places
from pagebus.actors.executor.adapters.reading import Read, reader
from pagebus.actors.executor.device.errors import PlanError
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.adapted.slots import AdapterSlots
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.executor.models.network import Network
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.messages import AdapterRead, AdapterSource, StepPlan


class Wanted(NamedTuple):
    """Which plan wants an adapter: an answer names it, for another plan may want the same one later."""

    scheduler_epoch: int
    step: int


class Residents:
    """The adapters of one executor, by digest. ``tell`` is called from any thread.

    ``num_host``: how many are kept in host memory, those on the device included.
    """

    def __init__(
        self, places: Places, slots: AdapterSlots, read: Read, num_host: int, tell: Callable[[AdapterRead], None]
    ) -> None:
        self.slots = slots
        self._places, self._read, self._tell = places, read, tell
        self._num_host = num_host
        self._content: OrderedDict[int, str] = OrderedDict((place, "") for place in range(places.count))
        """What lies in each place, the one filled longest ago first."""
        self._held: dict[str, int] = {}
        """Places of what the scheduler counts on."""
        self._wanted: dict[str, Wanted] = {}
        self._read_by_now: queue.SimpleQueue[tuple[str, Wanted, Image | None]] = queue.SimpleQueue()
        self._host: OrderedDict[str, Image] = OrderedDict()
        self._epoch = 0

    def apply(self, plan: StepPlan, scheduler_epoch: int) -> None:
        """Follow a plan, before its pass.

        Raises:
            PlanError: it uses an adapter that is not there, or loads more than there are places.
        """
        if scheduler_epoch != self._epoch:  # a new scheduler counts on nothing
            self._epoch = scheduler_epoch
            self._held.clear()
            self._wanted.clear()
            self.slots.of_slot.fill(-1)
        self._settle()
        for digest in plan.dropped_adapters:
            self._held.pop(digest, None)
        for source in plan.loaded_adapters:
            self._load(source, Wanted(scheduler_epoch, plan.step))
        self.slots.of_slot[plan.freed_slots] = -1
        for new in plan.new_sequences:
            if new.adapter and new.adapter not in self._held:
                raise PlanError(f"sequence {new.sequence_id} has adapter {new.adapter}, which is not on the device")
            self.slots.of_slot[new.slot] = self._held[new.adapter] if new.adapter else -1

    def _load(self, source: AdapterSource, wanted: Wanted) -> None:
        if len(self._held) + len(self._wanted) >= self._places.count:
            raise PlanError(f"adapter {source.digest} is one more than there are places for")
        known = self._host.get(source.digest)
        if known is None:
            self._wanted[source.digest] = wanted
            threading.Thread(target=self._fetch, args=(source, wanted), name="adapter", daemon=True).start()
            return
        self._place(source.digest, known)
        self._tell(_answer(source.digest, wanted))

    def _fetch(self, source: AdapterSource, wanted: Wanted) -> None:
        """Read an adapter, in a thread of its own, and say so."""
        adapter: Image | None = None
        error = ""
        try:
            adapter = self._places.image(self._read(source))
        except Exception as problem:  # whatever a file may bring about ends a request, not the executor
            error = str(problem) if isinstance(problem, AdapterError) else f"{type(problem).__name__}: {problem}"
        self._read_by_now.put((source.digest, wanted, adapter))
        self._tell(_answer(source.digest, wanted, error))

    def _settle(self) -> None:
        """Put what has been read into places, if it is still wanted."""
        while not self._read_by_now.empty():
            digest, wanted, adapter = self._read_by_now.get()
            is_wanted = self._wanted.get(digest) == wanted
            if is_wanted:
                del self._wanted[digest]
            if adapter is not None:
                self._keep(digest, adapter)
                if is_wanted:
                    self._place(digest, adapter)

    def _keep(self, digest: str, adapter: Image) -> None:
        """In host memory, for its return."""
        self._host[digest] = adapter
        self._host.move_to_end(digest)
        while len(self._host) > self._num_host:
            self._host.popitem(last=False)

    def _place(self, digest: str, adapter: Image) -> None:
        """In a place on the device, unless it is in one."""
        if digest in self._host:
            self._host.move_to_end(digest)
        used = set(self._held.values())
        place = next((place for place, there in self._content.items() if there == digest), None)
        if place is None:
            place = next(place for place in self._content if place not in used)
            self._places.fill(place, adapter)
            self._content[place] = digest
        self._content.move_to_end(place)
        self._held[digest] = place


def make_residents(
    settings: Settings, network: Network, ops: Ops, most_samples: int, tell: Callable[[AdapterRead], None]
) -> Residents | None:
    """``most_samples``: the most tokens that a step samples. None where adapters are not enabled.

    Raises:
        SettingsError: the model only pools.
    """
    if not settings.enable_lora:
        return None
    config = network.config
    if not isinstance(network, Decoder) or config.pooler is not None:
        raise SettingsError(f"--enable-lora: {config.architecture} is served without adapters")
    targets = settings.lora_target_modules
    places = Places(network, settings.max_loras, settings.max_lora_rank, targets)
    read = reader(network.config, settings.max_lora_rank, network.parameters.dtype, targets)
    device = network.parameters.device
    slots = AdapterSlots(
        network.adapters, ops, settings.max_num_seqs + 1, most_samples, device, adapt_heads=places.adapt_heads
    )
    return Residents(places, slots, read, settings.num_host_loras, tell)


def _answer(digest: str, wanted: Wanted, error: str = "") -> AdapterRead:
    """Which replica says so is for its actor to add."""
    return AdapterRead(
        replica="", executor_epoch=0, scheduler_epoch=wanted.scheduler_epoch, step=wanted.step, digest=digest,
        error=error,
    )  # fmt: skip
