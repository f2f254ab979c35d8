"""Pulls between GPUs, and between two processes on one: right bytes, over CUDA's handles and over TCP."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from pagebus.actors.executor.device.promises import Early
from pagebus.actors.executor.memory.block_parts import HeadRows
from pagebus.actors.executor.memory.shared_memory import SharedMemory
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.carriers.shared_file import SharedFile
from pagebus.actors.executor.moves.divided import DividedSource
from pagebus.actors.executor.moves.group import Group
from pagebus.actors.executor.moves.own_cache import OwnCache, device_name
from pagebus.actors.executor.moves.source import Source
from tests.actors.executor.moves.test_engines import MAX_TOKENS, PROMPT, go_on, pull
from tests.gpu.moves.device_source import FIRST_HOST, ROOT, DeviceCache, DeviceSource, content, host_memory
from tests.gpu.moves.engine_source import ON_GPU
from tests.helpers.engine_driver import Driver, ints
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

NUM_BLOCKS, BLOCK_BYTES, NUM_HOSTS = 300, 200_000, 1000
"""A host tier of three chunks of 335 blocks, the last of which is not full."""
GPUS = list(range(torch.cuda.device_count())) or [0]
OWN = torch.device("cuda", 0)


@pytest.fixture(scope="module", params=GPUS[:2], ids=lambda gpu: f"from-gpu-{gpu}")
def source(request: pytest.FixtureRequest) -> Iterator[DeviceSource]:
    with DeviceSource(request.param, NUM_BLOCKS, BLOCK_BYTES, NUM_HOSTS) as process:
        yield process


@pytest.fixture
def own() -> DeviceCache:
    return DeviceCache(NUM_BLOCKS, BLOCK_BYTES, OWN)


def copy(address: Address, own: DeviceCache, sources: list[int], targets: list[int]) -> None:
    pulled = Source(address, own.blocks, network=address.host == "elsewhere")
    pulled.copy(ints(sources), ints(targets), lambda: False)
    pulled.close()


@pytest.mark.parametrize("way", ["memory", "memory, one by one", "network"])
def test_blocks_are_copied(source: DeviceSource, own: DeviceCache, way: str) -> None:
    """In any order, in runs, more than are queued at a time; those and no others."""
    address = replace(source.address, host="elsewhere") if way == "network" else source.address
    own.blocks.driver.in_batches &= way != "memory, one by one"
    rng = random.Random(1)
    scattered = rng.sample(range(NUM_BLOCKS), 200), rng.sample(range(NUM_BLOCKS), 200)
    for sources, targets in (([5], [7]), (list(range(10, 80)), list(range(3, 73))), scattered):
        own.tensor.zero_()
        torch.cuda.synchronize()
        copy(address, own, sources, targets)
        assert own.holds(sources, targets)
        assert not own.tensor[[each for each in range(NUM_BLOCKS) if each not in targets]].any()


@pytest.mark.parametrize("spread", ["in one run", "scattered"])
def test_promised_blocks_are_there_behind_their_event(source: DeviceSource, own: DeviceCache, spread: str) -> None:
    """What a stream does behind it finds all of them, many times over; who does not wait may find others."""
    rng, places = random.Random(3), range(NUM_BLOCKS)
    pulled = Source(source.address, own.blocks, network=False)
    for turn in range(50):
        sources = rng.sample(places, 200) if spread == "scattered" else list(range(turn, turn + 200))
        targets = rng.sample(places, 200) if spread == "scattered" else list(range(50 - turn, 250 - turn))
        own.tensor.zero_()
        torch.cuda.synchronize()
        found: list[torch.Tensor] = []

        def tell(event: torch.cuda.Event, found: list[torch.Tensor] = found, targets: list[int] = targets) -> None:
            torch.cuda.current_stream().wait_event(event)
            found.append(own.tensor[torch.tensor(targets, device=OWN)])

        early = Early(rng.randrange(1, 200), tell)
        pulled.copy(ints(sources), ints(targets), lambda: False, early=early)
        torch.cuda.synchronize()
        assert own.holds(sources, targets)
        assert early.is_told == bool(found)
        assert all(torch.equal(each, content(sources, BLOCK_BYTES, OWN)) for each in found)
        assert found or spread == "in one run"  # which is one copy as long as it is short
    pulled.close()


@pytest.mark.parametrize("way", ["locked", "locked, one by one", "through buffers", "network"])
def test_blocks_of_a_host_tier_are_copied(source: DeviceSource, own: DeviceCache, way: str) -> None:
    """In any order, and across the ends of chunks."""
    address = replace(source.address, host="elsewhere") if way == "network" else source.address
    own.blocks.driver.in_batches &= way != "locked, one by one"
    pulled = Source(address, own.blocks, network=way == "network")
    if way == "through buffers":
        pulled._carriers[True] = [each for each in pulled._carriers[True] if isinstance(each, SharedFile)]
    rng = random.Random(1)
    scattered = rng.sample(range(NUM_HOSTS), 200), rng.sample(range(NUM_BLOCKS), 200)
    for sources, targets in (([999], [7]), (list(range(300, 370)), list(range(3, 73))), scattered):
        own.tensor.zero_()
        torch.cuda.synchronize()
        pulled.prepare(ints(sources), hosts=True)
        pulled.copy(ints(sources), ints(targets), lambda: False, hosts=True)
        assert own.holds([FIRST_HOST + each for each in sources], targets)
        assert not own.tensor[[each for each in range(NUM_BLOCKS) if each not in targets]].any()
    pulled.close()


@pytest.mark.parametrize("way", ["memory", "network", "host tier"])
def test_heads_are_cut_out_of_blocks(source: DeviceSource, way: str) -> None:
    """One of two heads, and two of either of two ranks; more blocks than come at a time."""
    rows, size, hosts = 100, 1000, way == "host tier"
    address = replace(source.address, host="elsewhere") if way == "network" else source.address
    both = (HeadRows(rows, size, 0, 2),)
    behind = replace(address, parts=(HeadRows(rows, size, 2, 2),))
    rng = random.Random(2)
    sources, targets = rng.sample(range(NUM_BLOCKS), 200), rng.sample(range(NUM_BLOCKS), 200)
    expected = content([FIRST_HOST * hosts + each for each in sources], BLOCK_BYTES, OWN).view(-1, rows, 2, size)
    for count, part in ((1, HeadRows(rows, size, 1, 1)), (4, HeadRows(rows, size, 0, 4))):
        own = DeviceCache(NUM_BLOCKS, count * BLOCK_BYTES // 2, OWN)
        group = Group(0, (replace(address, parts=(part,), others=()),))
        lender = replace(address, parts=both, others=(behind,) if count == 4 else ())
        pulled = DividedSource(group.lenders(lender), own.blocks, network=way == "network")
        pulled.prepare(ints(sources), hosts=hosts)
        pulled.copy(ints(sources), ints(targets), lambda: False, hosts=hosts)
        found = own.tensor.view(NUM_BLOCKS, rows, count, size)
        wanted = expected[:, :, 1:] if count == 1 else expected.repeat(1, 1, 2, 1)
        assert torch.equal(found[targets], wanted)
        assert not found[[each for each in range(NUM_BLOCKS) if each not in targets]].any()
        pulled.close()


def test_blocks_of_the_own_host_tier_are_copied(own: DeviceCache) -> None:
    memory = host_memory(NUM_HOSTS, BLOCK_BYTES, OWN)
    cache = OwnCache(own.blocks, SharedMemory(0), device_name(OWN), memory=memory)
    pulled = Source(cache.address, own.blocks, network=False, memory=memory)
    sources, targets = list(range(300, 370)), list(range(3, 73))
    pulled.copy(ints(sources), ints(targets), lambda: False, hosts=True)
    assert own.holds([FIRST_HOST + each for each in sources], targets)
    cache.close()
    memory.close()


def test_a_neighbour_that_is_gone_takes_its_host_tier_with_it(own: DeviceCache) -> None:
    """Its memory is free once it is not page-locked here any more."""
    with DeviceSource(0, 1, BLOCK_BYTES, NUM_HOSTS) as process:
        pulled = Source(process.address, own.blocks, network=False)
        pulled.copy(ints([1, 900]), ints([1, 2]), lambda: False, hosts=True)
        assert own.holds([FIRST_HOST + 1, FIRST_HOST + 900], [1, 2])
        before = num_mapped()
        process.kill()
        with pytest.raises(MoveError, match="is gone"):
            pulled.copy(ints([1]), ints([1]), lambda: False, hosts=True)
        assert num_mapped() == before
        pulled.close()
        assert num_mapped() == before - 1


def num_mapped() -> int:
    """Pieces of shared memory that this process has mapped."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        return sum("pagebus-kv" in line for line in lines)


def test_threads_of_several_sources_do_not_disturb_each_other(source: DeviceSource, own: DeviceCache) -> None:
    """One over memory, two over TCP, at the same time."""
    far = replace(source.address, host="elsewhere")
    parts = [list(range(start, start + 100)) for start in (0, 100, 200)]
    errors: list[BaseException] = []

    def work(address: Address, part: list[int]) -> None:
        try:
            own.blocks.prepare_thread()
            copy(address, own, part, part[::-1])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=each) for each in zip((source.address, far, far), parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(own.holds(part, part[::-1]) for part in parts)


def test_a_handle_that_cannot_be_opened_is_no_more_than_a_failed_pull(source: DeviceSource, own: DeviceCache) -> None:
    """The network is taken in its place, if there is one; the device goes on."""
    for handle in ("", "00", "zz", "00" * 64, "ab" * 64):
        with pytest.raises(MoveError):
            copy(replace(source.address, handle=handle), own, [1], [1])
    pulled = Source(replace(source.address, handle="ab" * 64), own.blocks, network=True)
    pulled.copy(ints([4]), ints([1]), lambda: False)
    assert own.holds([4], [1])


def test_a_pull_that_nobody_waits_for_ends(source: DeviceSource, own: DeviceCache) -> None:
    with pytest.raises(Abandoned):
        Source(source.address, own.blocks, network=False).copy(ints([1]), ints([1]), lambda: True)
    assert not own.tensor.any()


def test_a_source_that_is_gone_leaves_its_memory(own: DeviceCache) -> None:
    """Once the pull's thread has seen it, and closed what was open."""
    torch.cuda.synchronize()
    size = 2 << 30
    with DeviceSource(0, 1024, size // 1024) as process:
        big = DeviceCache(2, size // 1024, OWN)
        pulled = Source(process.address, big.blocks, network=False)
        pulled.copy(ints([1000]), ints([1]), lambda: False)
        assert big.holds([1000], [1])
        used = torch.cuda.mem_get_info(OWN)[0]
        process.kill()
        assert pulled.is_gone
        with pytest.raises(MoveError, match="is gone"):
            pulled.copy(ints([1]), ints([1]), lambda: False)
        held = torch.cuda.mem_get_info(OWN)[0] - used
        pulled.close()
        free = torch.cuda.mem_get_info(OWN)[0] - used
    print(json.dumps({"freed_by_its_end_mib": held >> 20, "freed_by_closing_mib": free >> 20}))
    assert free >= size


def test_an_engine_goes_on_with_blocks_of_another_process(tmp_path: Path) -> None:
    """With the tokens that one engine alone gives."""
    folder = make_reference(tmp_path, REFERENCE_CONFIGS[3])
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.moves.engine_source", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        cwd=ROOT,
    )
    driver = Driver(folder, **ON_GPU)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        scheduler, targets = driver.scheduler(), [50, 11, 12, 30]
        scheduler.step = 1
        report = pull(driver, 1, told["address"], told["blocks"], targets)
        assert report.there, report.error
        assert go_on(driver, scheduler, targets) == reference_generate(folder, [PROMPT], MAX_TOKENS)[0]
    finally:
        driver.close()
        process.communicate()
        gc.collect()
