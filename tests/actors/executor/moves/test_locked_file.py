"""A neighbour's host tier as a GPU reads it, with a driver that copies by the CPU: what is page-locked, and when."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pagebus.actors.executor.memory import host_memory
from pagebus.actors.executor.moves.carriers import device_blocks
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.driver import Addresses
from pagebus.actors.executor.moves.carriers.errors import MoveError
from pagebus.actors.executor.moves.carriers.locked_file import LockedFile
from pagebus.actors.executor.moves.source import Source
from tests.actors.executor.moves.caches import BLOCK_BYTES, FIRST_HOST, NUM_BLOCKS, NUM_HOSTS, LocalCache
from tests.helpers.engine_driver import ints

PER_CHUNK = 7
EVERY = list(range(NUM_BLOCKS))


class FakeDriver:
    """Copies only what was locked, in one piece each."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = False

    def lock(self, address: int, num_bytes: int) -> None:
        if self.refuses:
            raise MoveError("there is a limit")
        assert address not in self.locked
        self.locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            assert any(start <= source and source + size <= start + count for start, count in self.locked.items())
            ctypes.memmove(target, source, size)


class FakeDevice(DeviceBlocks):
    """A cache that is no GPU's."""

    def __init__(self, cache: LocalCache) -> None:
        self.cache, self.fake = cache, FakeDriver()
        self.num_blocks, self.block_bytes = cache.blocks.num_blocks, cache.blocks.block_bytes
        self.base, self.driver = int(cache.bytes.ctypes.data), cast("Any", self.fake)
        self._incoming = cast("Any", SimpleNamespace(cuda_stream=0))

    def fill(self, ids: Any, receive: Any) -> None:
        self.cache.blocks.fill(ids, receive)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", PER_CHUNK * BLOCK_BYTES)
    monkeypatch.setattr(device_blocks, "_mark", lambda stream: SimpleNamespace(synchronize=lambda: None))


@pytest.mark.parametrize("sources", [[3], [6, 7, 8, 13, 14, 39], [9, 8, 7], EVERY, EVERY[::-1]])
def test_chunks_are_locked_as_they_are_needed(sources: list[int]) -> None:
    """Once, and no others; all are given back in the end."""
    source, device = LocalCache(filled=True), FakeDevice(LocalCache())
    pulled = Source(source.address, device, network=False)
    targets = EVERY[: len(sources)]
    for _ in range(2):
        pulled.prepare(ints(sources), hosts=True)
        assert len(device.fake.locked) == len({each // PER_CHUNK for each in sources})
        pulled.copy(ints(sources), ints(targets), lambda: False, hosts=True)
    assert device.cache.holds([FIRST_HOST + each for each in sources], targets)
    assert not device.cache.bytes[len(sources) :].any()
    pulled.close()
    assert device.fake.locked == {}


def test_the_own_host_tier_needs_no_more() -> None:
    device = FakeDevice(LocalCache(filled=True))
    memory = device.cache.memory
    device.fake.locked[memory.address] = NUM_HOSTS * memory.layout.stride
    pulled = Source(device.cache.address, device, network=False, memory=memory)
    pulled.copy(ints([6, 7, 39]), ints([1, 2, 5]), lambda: False, hosts=True)
    assert device.cache.holds([FIRST_HOST + 6, FIRST_HOST + 7, FIRST_HOST + 39], [1, 2, 5])


def test_where_nothing_can_be_locked_buffers_are_used() -> None:
    """It is not tried again."""
    source, device = LocalCache(filled=True), FakeDevice(LocalCache())
    device.fake.refuses = True
    pulled = Source(source.address, device, network=False)
    pulled.prepare(ints([4]), hosts=True)
    device.fake.refuses = False
    pulled.copy(ints([4, 20]), ints([1, 2]), lambda: False, hosts=True)
    assert device.cache.holds([FIRST_HOST + 4, FIRST_HOST + 20], [1, 2])
    assert device.fake.locked == {}


def test_a_neighbour_without_its_host_tier_is_an_error() -> None:
    """Also if it was there before."""
    source, device = LocalCache(filled=True), FakeDevice(LocalCache())
    hosts = source.address.host_tier()
    assert hosts is not None
    carrier = LockedFile(hosts, device)
    carrier.copy(ints([4]), ints([1]), lambda: False)
    source.memory.close()
    with pytest.raises(MoveError):
        carrier.copy(ints([4]), ints([1]), lambda: False)
    with pytest.raises(MoveError):
        LockedFile(hosts, device).copy(ints([4]), ints([1]), lambda: False)
    assert np.count_nonzero(device.cache.bytes[1]) > 0
