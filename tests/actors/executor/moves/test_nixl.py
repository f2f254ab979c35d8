"""Pulls through NIXL, with the real package over UCX: right bytes, or an error that says why not, and nothing later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from pagebus.actors.executor.memory import host_memory
from pagebus.actors.executor.moves import opening
from pagebus.actors.executor.moves.carriers.address import Address, NixlAddress
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.nixl import carrier, package
from pagebus.actors.executor.moves.nixl.carrier import nixl_carriers
from pagebus.actors.executor.moves.nixl.link import Link
from pagebus.actors.executor.moves.source import Source
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings, SettingsError
from tests.actors.executor.moves.caches import (
    BLOCK_BYTES,
    FIRST_HOST,
    NUM_BLOCKS,
    LocalCache,
    OtherProcess,
)
from tests.actors.executor.moves.test_moves import Target, plan_of
from tests.helpers.engine_driver import Driver, ints
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference

needs_nixl = pytest.mark.skipif(not package.is_installed(), reason="NIXL is not installed: pip install 'pagebus[nixl]'")
EVERY = list(range(NUM_BLOCKS))
SHORT_S = 0.2


@pytest.fixture(autouse=True)
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of UCX: TCP, as between hosts without RDMA, or what a test names."""
    monkeypatch.setenv("UCX_TLS", getattr(request, "param", "tcp"))


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    with OtherProcess(nixl=True) as process:
        yield process


def far(address: Address) -> Address:
    """As if it were on another host."""
    return replace(address, host="elsewhere")


def pull(address: Address, own: LocalCache, sources: list[int], targets: list[int], *, hosts: bool = False) -> None:
    source = Source(far(address), own.blocks, network=True)
    source.copy(ints(sources), ints(targets), lambda: False, hosts=hosts)
    source.close()


@needs_nixl
@pytest.mark.parametrize("links", ["tcp", "all"], indirect=True)
def test_blocks_of_another_process_come_through_nixl(other: OtherProcess) -> None:
    """Those and no others, of its cache and of its host tier, alone and in runs."""
    own = LocalCache()
    source = Source(far(other.address), own.blocks, network=True)
    for sources, targets in (([3], [5]), ([0, 1, 2, 7, 8, 23], [4, 5, 6, 7, 1, 0]), ([9, 8, 7], [1, 2, 3])):
        own.bytes[:] = 0
        source.copy(ints(sources), ints(targets), lambda: False)
        assert own.holds(sources, targets)
        assert not own.bytes[[each for each in EVERY if each not in targets]].any()
    source.copy(ints([39, 0, 1, 17]), ints([0, 1, 2, 8]), lambda: False, hosts=True)
    assert own.holds([FIRST_HOST + each for each in (39, 0, 1, 17)], [0, 1, 2, 8])
    source.close()


@needs_nixl
def test_many_blocks_are_several_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are on their way at a time; and a host tier has chunks with room between them."""
    monkeypatch.setattr(carrier, "PIECE_BYTES", 5 * BLOCK_BYTES)
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 7 * BLOCK_BYTES)
    own = LocalCache()
    with OtherProcess(nixl=True) as process:
        pull(process.address, own, EVERY, EVERY[::-1])
        assert own.holds(EVERY, EVERY[::-1])
        pull(process.address, own, EVERY[::-1], EVERY, hosts=True)
        assert own.holds([FIRST_HOST + each for each in EVERY[::-1]], EVERY)


@needs_nixl
def test_memory_of_the_host_is_the_first_choice(other: OtherProcess) -> None:
    """NIXL's metadata is not even looked at."""
    assert other.address.nixl is not None
    own, seen = LocalCache(), replace(other.address, nixl=replace(other.address.nixl, agent="nothing"))
    Source(seen, own.blocks, network=True).copy(ints([2]), ints([3]), lambda: False)
    assert own.holds([2], [3])
    with pytest.raises(MoveError, match="NIXL"):
        pull(seen, own, [2], [3])


@needs_nixl
def test_another_cache_is_not_taken_for_it(other: OtherProcess) -> None:
    """The number on the page is another; or the address has a page that is none."""
    own, told = LocalCache(), other.address.nixl
    assert told is not None
    for wrong in (
        replace(other.address, nonce="00" * 16),
        replace(other.address, nixl=replace(told, page=told.hosts_page)),
        replace(other.address, nixl=replace(told, page=4096)),
    ):
        with pytest.raises(MoveError, match=r"does not have this cache|NIXL"):
            pull(wrong, own, [1], [1])
    with pytest.raises(MoveError, match="block 24 is asked for"):
        pull(other.address, own, [24], [0])
    assert not own.bytes.any()


@needs_nixl
def test_a_source_that_has_ended_is_an_error(other: OtherProcess) -> None:
    """First its engine, then its process; and the link is open, or is not yet."""
    own = LocalCache()
    opened = Source(far(other.address), own.blocks, network=True)
    opened.copy(ints([2]), ints([3]), lambda: False)
    other.close_cache()
    for _ in range(2):
        with pytest.raises(MoveError, match=r"does not have this cache|NIXL"):
            opened.copy(ints([1]), ints([1]), lambda: False)
    other.kill()
    with pytest.raises(MoveError, match="NIXL"):
        opened.copy(ints([1]), ints([1]), lambda: False)
    with pytest.raises(MoveError, match="NIXL"):
        pull(other.address, own, [1], [1])
    assert not own.bytes[1].any()


@needs_nixl
def test_a_source_that_dies_in_the_middle_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first of many transfers."""
    monkeypatch.setattr(carrier, "PIECE_BYTES", BLOCK_BYTES)
    own = LocalCache()
    with OtherProcess(nixl=True) as process:
        (cache,), _ = nixl_carriers(process.address, own.blocks)
        looks = 0

        def stop() -> bool:
            nonlocal looks
            looks += 1
            if looks == 8:
                process.kill()
            return False

        with pytest.raises(MoveError, match="NIXL"):
            cache.copy(ints(EVERY), ints(EVERY), stop)
    assert looks >= 8


@needs_nixl
def test_a_source_that_hangs_is_an_error_and_writes_nothing_later(other: OtherProcess) -> None:
    """When it goes on, what it was asked for is of nobody's interest, and the blocks may have another owner."""
    own = LocalCache()
    assert other.address.nixl is not None
    (cache,), _ = nixl_carriers(other.address, own.blocks)
    link = Link(other.address.nixl.agent, own.blocks, SHORT_S)
    cache._link = link
    cache.copy(ints([2]), ints([3]), lambda: False)
    with other.stopped():
        theirs, place = next(cache._wanted(ints([5, 6]), ints([8, 9])))
        with pytest.raises(MoveError, match="nothing has come"):
            link.read([(theirs, place)], package.HOST, lambda: False)
        assert link._agent is None
        with pytest.raises(Abandoned):
            link.read([(theirs, place)], package.HOST, lambda: True)
    with suppress(MoveError):
        cache.copy(ints([4]), ints([4]), lambda: False)
    assert not own.bytes[[8, 9]].any()


@needs_nixl
def test_a_pull_that_nobody_waits_for_ends(other: OtherProcess) -> None:
    """The next one is as if there had been none."""
    own = LocalCache()
    source = Source(far(other.address), own.blocks, network=True)
    with pytest.raises(Abandoned):
        source.copy(ints([1]), ints([1]), lambda: True)
    assert not own.bytes.any()
    source.copy(ints([1]), ints([1]), lambda: False)
    assert own.holds([1], [1])
    source.close()


@needs_nixl
def test_plans_order_pulls_through_nixl(other: OtherProcess) -> None:
    """Each gets its report, of both sides' failures too."""
    target = Target(network=True)
    target.order((far(other.address), [3, 4], [1, 2]), (far(other.address), [9], [3]))
    told = [target.report() for _ in range(2)]
    assert [(each.pull, each.there, each.error) for each in told] == [(1, True, ""), (2, True, "")]
    assert target.cache.holds([3, 4, 9], [1, 2, 3])
    other.kill()
    target.moves.apply(plan_of((far(other.address), [5], [4]), first=3), 1, lambda: None)
    assert "NIXL" in target.report().error
    target.moves.close()


# -- without the package -----------------------------------------------------------------------------------------------
@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "MODULES", ("no_such_package",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("nixl") / "model", REFERENCE_CONFIGS[0])


@pytest.mark.usefixtures("missing")
def test_who_asks_for_nixl_without_it_is_told_at_the_start(folder: Path) -> None:
    """Before weights are read."""
    settings = Settings(model=str(folder), kv_moves="nixl")
    with pytest.raises(SettingsError, match=r"--kv-moves nixl needs .* pip install 'pagebus\[nixl\]'"):
        opening.shares_host_tier(settings, ModelConfig.load(folder), torch.device("cpu"))


@pytest.mark.usefixtures("missing")
def test_a_lender_with_nixl_is_no_source_for_who_has_none() -> None:
    """Its blocks are computed."""
    told = NixlAddress(agent="", page=1, base=2)
    with pytest.raises(MoveError, match="pip install"):
        pull(replace(LocalCache(filled=True).address, nixl=told), LocalCache(), [1], [1])


@needs_nixl
def test_an_executor_lends_through_nixl(folder: Path) -> None:
    """It has no server for TCP then; and says what NIXL needs as it says the rest."""
    made = Driver(folder, dtype="float32", num_gpu_blocks_override=60, max_num_seqs=4, kv_moves="nixl")
    told = Address.parse(made.info.kv_address)
    made.close()
    assert told.nixl is not None
    assert (told.port, told.secret) == (0, "")
    assert Address.parse(told.text()) == told


@needs_nixl
def test_an_agent_is_gone_with_the_memory_that_it_reads() -> None:
    """A cache that is closed is read by nobody, though its process lives."""
    source, own = LocalCache(filled=True, nixl=True), LocalCache()
    pull(source.address, own, [1], [1])
    source.own.close()
    with pytest.raises(MoveError):
        pull(source.address, own, [2], [2])
    assert own.holds([1], [1])
    assert not own.bytes[2].any()
