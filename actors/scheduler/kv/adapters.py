"""The adapters of one replica: which are on its device, and which its executor reads.

An adapter is wanted, then read beside the steps, then ready: only then does a sequence with it get a slot. At most
``--max-loras`` have a place. One without sequences keeps its place until another needs it; the one that was used
longest ago goes first. The executor may hold more of them in its own memory, which makes a return quick.

Of an executor of several ranks each reads its part. The adapter is ready once all ranks have told that, and dropped on
all if one cannot read it: so every rank holds the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagebus.bus.messages import AdapterRead, AdapterSource


@dataclass(slots=True)
class _Reading:
    """Which plan wants an adapter (0: the next one), and what each rank has said of it: "" or an error."""

    name: str
    step: int = 0
    told: dict[int, str] = field(default_factory=dict)


class Adapters:
    """``capacity`` places on each of ``ranks``. ``loaded`` and ``dropped`` are what the next plan has to say."""

    def __init__(self, capacity: int, ranks: int = 1) -> None:
        self.capacity, self._ranks = capacity, ranks
        self.loaded: list[AdapterSource] = []
        self.dropped: list[str] = []
        self._ready: dict[str, str] = {}
        """Names by digest, the one used last behind."""
        self._reading: dict[str, _Reading] = {}
        """By digest."""

    @property
    def resident(self) -> tuple[str, ...]:
        """All that are ready, by the names that they were first asked for by, the one used last behind."""
        return tuple(self._ready.values())

    def is_ready(self, digest: str) -> bool:
        """Whether sequences with it may run."""
        return digest in self._ready

    def is_read(self, digest: str) -> bool:
        """Whether it will be ready, or the executor will say why not."""
        return digest in self._reading

    def use(self, digest: str) -> None:
        """A sequence with it gets a slot."""
        self._ready[digest] = self._ready.pop(digest)

    def want(self, adapter: AdapterSource, in_use: Iterable[str]) -> bool:
        """Have the next plan load an adapter, in the place of one that is not ``in_use`` if need be. False: all are."""
        if len(self._ready) + len(self._reading) >= self.capacity:
            used = set(in_use)
            idle = next((digest for digest in self._ready if digest not in used), None)
            if idle is None:
                return False
            del self._ready[idle]
            self.dropped.append(idle)
        self._reading[adapter.digest] = _Reading(adapter.name)
        self.loaded.append(adapter)
        return True

    def planned(self, step: int) -> None:
        """This plan says what was to be said."""
        for adapter in self.loaded:
            self._reading[adapter.digest].step = step
        self.loaded, self.dropped = [], []

    def take(self, read: AdapterRead) -> str:
        """What a rank says of an adapter. Once all have: the error of the first that has one, or none."""
        reading = self._reading.get(read.digest)
        if reading is None or reading.step != read.step:
            return ""
        reading.told[read.rank] = read.error
        if len(reading.told) < self._ranks:
            return ""
        del self._reading[read.digest]
        failed = min((rank for rank, error in reading.told.items() if error), default=None)
        if failed is None:
            self._ready[read.digest] = reading.name
            return ""
        if not all(reading.told.values()):
            self.dropped.append(read.digest)  # it is there on some
        return f"rank {failed}: {reading.told[failed]}" if failed else reading.told[failed]

    def check_integrity(self, in_use: Iterable[str]) -> None:
        """What sequences use is ready, and there are not too many.

        Raises:
            AssertionError: it is not so.
        """
        missing = {digest for digest in in_use if digest} - self._ready.keys()
        assert not missing, f"adapters of running sequences are not on the device: {missing}"
        assert not self._ready.keys() & self._reading.keys()
        assert len(self._ready) + len(self._reading) <= self.capacity
