"""Pulls from the memory of another process of the host: right bytes, or an error that says why not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from pagebus.actors.executor.memory import host_memory
from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.memory.shared_memory import SharedMemory
from pagebus.actors.executor.moves.carriers.address import Address, host_id
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.carriers.runs import runs
from pagebus.actors.executor.moves.carriers.shared_file import is_there
from pagebus.actors.executor.moves.source import Source
from tests.actors.executor.moves.caches import (
    BLOCK_BYTES,
    FIRST_HOST,
    NUM_BLOCKS,
    NUM_HOSTS,
    LocalCache,
    OtherProcess,
)
from tests.helpers.engine_driver import ints


@pytest.fixture(scope="module")
def other() -> Iterator[OtherProcess]:
    with OtherProcess() as process:
        yield process


def pull(
    address: Address, own: LocalCache, sources: list[int], targets: list[int], memory: HostMemory | None = None,
    *, hosts: bool = False,
) -> None:  # fmt: skip
    source = Source(address, own.blocks, network=False, memory=memory)
    source.prepare(ints(sources), hosts=hosts)
    source.copy(ints(sources), ints(targets), lambda: False, hosts=hosts)
    source.close()


@pytest.mark.parametrize(
    ("sources", "targets"),
    [([3], [5]), ([0, 1, 2, 7, 8, 23], [4, 5, 6, 7, 1, 0]), ([9, 8, 7], [1, 2, 3]), (list(range(24)), list(range(24)))],
)
def test_blocks_of_another_process_are_copied(other: OtherProcess, sources: list[int], targets: list[int]) -> None:
    """Those and no others, alone and in runs."""
    own = LocalCache()
    pull(other.address, own, sources, targets)
    assert own.holds(sources, targets)
    assert not own.bytes[[each for each in range(NUM_BLOCKS) if each not in targets]].any()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of host tiers that are made now: seven blocks, and a part of a page that is not used."""
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 7 * BLOCK_BYTES)


EVERY = list(range(NUM_BLOCKS))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("sources", [[3], [6, 7, 8, 13, 14, 39], [9, 8, 7], EVERY, EVERY[::-1]])
def test_blocks_of_a_host_tier_are_copied(sources: list[int]) -> None:
    """As many as there are in a chunk, and beyond its end; one's own, too."""
    source, targets = LocalCache(filled=True), EVERY[: len(sources)]
    own = LocalCache()
    pull(source.address, own, sources, targets, hosts=True)
    assert own.holds([FIRST_HOST + each for each in sources], targets)
    assert not own.bytes[len(sources) :].any()
    pull(source.address, source, sources, targets, source.memory, hosts=True)
    assert source.holds([FIRST_HOST + each for each in sources], targets)


def test_blocks_of_another_process_host_tier_are_copied(other: OtherProcess) -> None:
    own, sources = LocalCache(), [1, 2, 3, 30, 17]
    pull(other.address, own, sources, [0, 1, 2, 8, 9], hosts=True)
    assert own.holds([FIRST_HOST + each for each in sources], [0, 1, 2, 8, 9])


def test_another_host_tier_is_not_taken_for_it(other: OtherProcess) -> None:
    """Nor one that has no such block, or is not to be read."""
    own, hosts = LocalCache(), other.address.hosts
    assert hosts is not None
    for wrong in (replace(hosts, nonce="00" * 16), replace(hosts, file=other.address.file), replace(hosts, file=0)):
        with pytest.raises(MoveError):
            pull(replace(other.address, hosts=wrong), own, [1], [1], hosts=True)
    for address in (other.address, replace(other.address, hosts=None)):
        with pytest.raises(MoveError, match="the source has"):
            pull(address, own, [NUM_HOSTS], [1], hosts=True)
    assert not own.bytes.any()


def test_a_host_tier_that_is_given_back_is_an_error() -> None:
    source, own = LocalCache(filled=True), LocalCache()
    source.memory.close()
    with pytest.raises(MoveError):
        pull(source.address, own, [1], [1], hosts=True)


def test_neighbours_are_joined() -> None:
    """Where both sides are, up to a limit."""
    assert runs(ints([4, 5, 6, 8, 9]), ints([0, 1, 2, 3, 5]), 10) == [(4, 0, 3), (8, 3, 1), (9, 5, 1)]
    assert runs(ints([1, 2, 3]), ints([7, 8, 9]), 2) == [(1, 7, 2), (3, 9, 1)]
    assert runs(ints([]), ints([]), 2) == []
    assert runs(ints([4, 5, 6, 7]), ints([0, 1, 2, 3]), 9, per_chunk=3) == [(4, 0, 2), (6, 2, 2)]
    five, nine = ints([*range(5), *range(7, 16)]), ints(range(20, 34))
    assert runs(five, nine, 3) == [(0, 20, 3), (3, 23, 2), (7, 25, 3), (10, 28, 3), (13, 31, 3)]
    assert runs(nine, five, 1) == [(20 + place, target, 1) for place, target in enumerate(five.tolist())]


def test_another_file_is_not_taken_for_the_cache(other: OtherProcess) -> None:
    """The process and the number may have been given to others."""
    own = LocalCache()
    for wrong in (
        replace(other.address, nonce="00" * 16),
        replace(other.address, pid=os.getpid(), file=LocalCache().shared.file),
        replace(other.address, file=0),
        replace(other.address, file=999),
    ):
        with pytest.raises(MoveError):
            pull(wrong, own, [1], [1])
    assert not own.bytes.any()


def test_a_source_that_has_ended_is_an_error() -> None:
    """First its engine, then its process."""
    own = LocalCache()
    with OtherProcess() as process:
        assert is_there(process.address)
        process.close_cache()
        assert not is_there(process.address)
        with pytest.raises(MoveError):
            pull(process.address, own, [1], [1])
        process.kill()
        with pytest.raises(MoveError, match="is gone"):
            pull(process.address, own, [1], [1])


def test_a_cache_that_ends_early_is_an_error() -> None:
    """The address promises more than there is."""
    source, own = LocalCache(filled=True, num_blocks=4), LocalCache()
    with pytest.raises(MoveError, match="block 4 is asked for"):
        pull(source.address, own, [4], [0])
    with pytest.raises(MoveError, match="ends before"):
        pull(replace(source.address, num_blocks=9), own, [3, 4], [0, 1])


def test_blocks_of_another_size_are_refused() -> None:
    source = LocalCache(filled=True)
    with pytest.raises(MoveError, match="bytes, ours"):
        pull(replace(source.address, block_bytes=BLOCK_BYTES // 2), LocalCache(), [1], [1])


@pytest.mark.parametrize("where", ["elsewhere", ""])
def test_another_host_cannot_be_reached_without_the_network(where: str) -> None:
    """Nor can one that does not know who it is."""
    source = LocalCache(filled=True)
    with pytest.raises(MoveError, match="no way"):
        pull(replace(source.address, host=where), LocalCache(), [1], [1])


def test_a_pull_that_nobody_waits_for_ends() -> None:
    """Between two pieces."""
    source, own = LocalCache(filled=True), LocalCache()
    with pytest.raises(Abandoned):
        Source(source.address, own.blocks, network=False).copy(ints([1]), ints([1]), lambda: True)
    assert not own.bytes.any()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"host": 5}'])
def test_what_is_no_address_is_an_error(text: str) -> None:
    with pytest.raises(MoveError, match="cannot be read"):
        Address.parse(text)


def test_an_address_is_read_as_it_was_written(other: OtherProcess) -> None:
    """And it is this host's."""
    assert Address.parse(other.address.text()) == other.address
    assert other.address.host == host_id() != ""


def test_memory_is_taken_when_it_is_written() -> None:
    """A cache of a GiB, of which one byte is used."""
    memory = SharedMemory(1 << 30)
    memory.bytes[12345] = 1
    assert os.fstat(memory.file).st_blocks * 512 < 1 << 22
    assert np.count_nonzero(memory.bytes[: 1 << 20]) == 1
    memory.close()
    memory.close()
