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

from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.carriers.source import Source
from tests.actors.executor.moves.test_engines import MAX_TOKENS, PROMPT, go_on, pull
from tests.gpu.moves.device_source import ROOT, DeviceCache, DeviceSource
from tests.gpu.moves.engine_source import ON_GPU
from tests.helpers.engine_driver import Driver, ints
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

NUM_BLOCKS, BLOCK_BYTES = 300, 200_000
GPUS = list(range(torch.cuda.device_count())) or [0]
OWN = torch.device("cuda", 0)


@pytest.fixture(scope="module", params=GPUS[:2], ids=lambda gpu: f"from-gpu-{gpu}")
def source(request: pytest.FixtureRequest) -> Iterator[DeviceSource]:
    with DeviceSource(request.param, NUM_BLOCKS, BLOCK_BYTES) as process:
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
