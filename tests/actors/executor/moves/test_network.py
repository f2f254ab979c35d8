"""Pulls over TCP: right bytes for who knows the secret, nothing for anybody else, and no wait without end."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from msgspec.structs import replace

from pagebus.actors.executor.moves.carriers import network, wire
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import HostBlocks
from pagebus.actors.executor.moves.carriers.network import Network
from pagebus.actors.executor.moves.carriers.server import Server
from pagebus.actors.executor.moves.source import Source
from tests.actors.executor.moves.caches import (
    BLOCK_BYTES,
    FIRST_HOST,
    NUM_BLOCKS,
    NUM_HOSTS,
    LocalCache,
    OtherProcess,
    content,
)
from tests.helpers.engine_driver import ints
from tests.helpers.waiting import LIMIT_S

LOCAL = "127.0.0.1"
SHORT_S = 0.2
BEYOND = NUM_BLOCKS + NUM_HOSTS
"""No block of the cache or of its host tier."""


@pytest.fixture
def source() -> Iterator[LocalCache]:
    cache = LocalCache(filled=True, listen=LOCAL)
    yield cache
    cache.own.close()


def far(address: Address) -> Address:
    """As if it were on another host."""
    return replace(address, host="elsewhere")


def test_blocks_come_over_the_network() -> None:
    """From another process, in any order."""
    own, sources, targets = LocalCache(), [0, 1, 2, 9, 23, 5], [7, 8, 9, 1, 0, 2]
    with OtherProcess() as process:
        pulled = Source(far(process.address), own.blocks, network=True)
        for _ in range(2):
            pulled.copy(ints(sources), ints(targets), lambda: False)
        process.kill()
        with pytest.raises(MoveError, match="Refused"):
            pulled.copy(ints(sources), ints(targets), lambda: False)
    assert own.holds(sources, targets)


def test_blocks_of_a_host_tier_come_over_the_network(source: LocalCache) -> None:
    """A server numbers them behind those of the cache, and may send both."""
    own, sources, targets = LocalCache(), [0, 39, 5, 6], [7, 8, 1, 2]
    pulled = Source(far(source.address), own.blocks, network=True)
    pulled.copy(ints(sources), ints(targets), lambda: False, hosts=True)
    assert own.holds([FIRST_HOST + each for each in sources], targets)
    mixed = [3, NUM_BLOCKS + 2, NUM_BLOCKS + 3, 4]
    Network(source.address, own.blocks).copy(ints(mixed), ints([0, 1, 2, 3]), lambda: False)
    assert own.holds([3, FIRST_HOST + 2, FIRST_HOST + 3, 4], [0, 1, 2, 3])


def test_many_blocks_take_several_requests(source: LocalCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_BLOCKS", 5)
    own, every = LocalCache(), list(range(NUM_BLOCKS))
    Network(source.address, own.blocks).copy(ints(every), ints(every[::-1]), lambda: False)
    assert own.holds(every, every[::-1])


def test_large_pulls_have_several_connections(source: LocalCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which bring a part each; if one fails, all do."""
    monkeypatch.setattr(network, "LEAST_BYTES", BLOCK_BYTES)
    own, every = LocalCache(), list(range(NUM_BLOCKS))
    Network(source.address, own.blocks).copy(ints(every), ints(every[::-1]), lambda: False)
    assert own.holds(every, every[::-1])
    with pytest.raises(MoveError, match="no such block"):
        Network(source.address, own.blocks).copy(ints([*every[:-1], BEYOND]), ints(every), lambda: False)
    with pytest.raises(Abandoned):
        Network(source.address, own.blocks).copy(ints(every), ints(every), lambda: True)


@pytest.mark.parametrize("change", [{"secret": "00" * 32}, {"nonce": "00" * 16}])
def test_who_does_not_know_the_secret_gets_nothing(source: LocalCache, change: dict[str, str]) -> None:
    """Nor who knows only that of a server before."""
    own = LocalCache()
    with pytest.raises(MoveError, match="closed the connection"):
        Network(replace(source.address, **change), own.blocks).copy(ints([1]), ints([1]), lambda: False)
    assert not own.bytes.any()


@pytest.mark.parametrize("block", [BEYOND, -1, 2**31 - 1])
def test_blocks_that_do_not_exist_are_refused(source: LocalCache, block: int) -> None:
    with pytest.raises(MoveError, match="no such block"):
        Network(source.address, LocalCache().blocks).copy(ints([0, block]), ints([0, 1]), lambda: False)


def ask(source: LocalCache, request: bytes) -> bytes:
    """All that a server says to a request."""
    with socket.create_connection((source.address.name, source.address.port), 10) as sock:
        try:
            sock.sendall(request)
            return b"".join(iter(lambda: sock.recv(1 << 16), b""))
        except ConnectionError:  # it has closed without reading all
            return b""


def test_requests_that_are_too_large_are_refused(source: LocalCache) -> None:
    """Before their ids are read. So are those for nothing, and other formats."""
    nonce, secret = source.shared.nonce, bytes.fromhex(source.address.secret)
    head = wire.request(nonce, secret, ints([]))[:-4]
    for count in (0, wire.MOST_BLOCKS + 1, 2**32 - 1):
        assert ask(source, head + count.to_bytes(4, "little")) == b""
    assert ask(source, b"GET / HTTP/1.1\r\n\r\n" + bytes(100)) == b""
    assert ask(source, wire.request(nonce, secret, ints([3]))) == wire.COMING + content(3).tobytes()


def test_a_thread_that_cannot_be_started_costs_one_pull(source: LocalCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones are served, and the server ends as always."""
    start, tries = threading.Thread.start, itertools.count()

    def fails_once(thread: threading.Thread) -> None:
        if thread.name == "moves-sender" and next(tries) == 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_once)
    request = wire.request(source.shared.nonce, bytes.fromhex(source.address.secret), ints([3]))
    assert ask(source, request) == b""
    assert ask(source, request) == wire.COMING + content(3).tobytes()


def test_a_request_that_does_not_end_is_cut_off() -> None:
    """It may not hold a connection for long."""
    cache = LocalCache(filled=True)
    with (
        closing(Server(LOCAL, cache.blocks, cache.shared.nonce, SHORT_S)) as server,
        socket.create_connection((LOCAL, server.port), 10) as sock,
    ):
        sock.sendall(b"pgbs")
        assert sock.recv(1) == b""


def hang(listener: socket.socket, told: bytes, over: threading.Event) -> None:
    """A server that says this and nothing more."""
    sock, _ = listener.accept()
    with sock:
        sock.sendall(told)
        over.wait(LIMIT_S)


@pytest.mark.parametrize("told", [b"", wire.COMING, wire.COMING + bytes(100)])
def test_a_source_that_hangs_is_an_error(told: bytes) -> None:
    """After some time without a byte; or at once, if nobody waits for the blocks any more."""
    own, over = LocalCache(), threading.Event()
    with socket.create_server((LOCAL, 0)) as listener:
        threads = [threading.Thread(target=hang, args=(listener, told, over)) for _ in range(2)]
        for thread in threads:
            thread.start()
        address = replace(LocalCache().address, name=LOCAL, port=listener.getsockname()[1], secret="00" * 32)
        with pytest.raises(MoveError, match="nothing has come"):
            Network(address, own.blocks, SHORT_S).copy(ints([1]), ints([1]), lambda: False)
        looks = iter(range(3))
        with pytest.raises(Abandoned):
            Network(address, own.blocks, 60).copy(ints([1]), ints([1]), lambda: next(looks, None) is None)
        over.set()
        for thread in threads:
            thread.join()


def test_a_source_that_closes_early_is_an_error() -> None:
    own, over = LocalCache(), threading.Event()
    over.set()
    with socket.create_server((LOCAL, 0)) as listener:
        thread = threading.Thread(target=hang, args=(listener, wire.COMING + bytes(7), over))
        thread.start()
        address = replace(LocalCache().address, name=LOCAL, port=listener.getsockname()[1], secret="00" * 32)
        with pytest.raises(MoveError, match="closed"):
            Network(address, own.blocks).copy(ints([1]), ints([1]), lambda: False)
        thread.join()


def test_the_network_is_the_second_choice(source: LocalCache) -> None:
    """Where the file cannot be read, both are told."""
    own = LocalCache()
    pulled = Source(replace(source.address, file=999), own.blocks, network=True)
    pulled.copy(ints([2]), ints([3]), lambda: False)
    assert own.holds([2], [3])
    source.own.close()
    with pytest.raises(MoveError, match=r"is gone.*Refused"):
        pulled.copy(ints([2]), ints([3]), lambda: False)


def test_a_server_that_closes_lets_go_of_everybody() -> None:
    """Also of who does not read what is sent."""

    class Endless(HostBlocks):
        def read(self, ids: object) -> Iterator[memoryview]:
            while True:
                yield memoryview(bytes(1 << 20))

    cache = LocalCache(filled=True)
    server = Server(LOCAL, Endless(torch.from_numpy(cache.bytes)), cache.shared.nonce)
    with socket.create_connection((LOCAL, server.port), 10) as sock:
        sock.sendall(wire.request(cache.shared.nonce, server.secret, ints([1])))
        assert sock.recv(1) == wire.COMING
        server.close()
