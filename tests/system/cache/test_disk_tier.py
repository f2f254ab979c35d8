"""Prompts outlive a restart on the disk, the whole way through real actors: the blocks are read, and the tokens are the
very same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate
from tests.helpers.waiting import eventually
from tests.system.harness import System, running

BLOCK, COUNT = 16, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("disk") / "model", REFERENCE_CONFIGS[0])


def settings(folder: Path) -> dict[str, object]:
    return {"disk_cache_dir": str(folder / "cache"), "disk_cache_gib": 0.1, "swap_space": 0.01}


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(REFERENCE_CONFIGS[0].vocab_size) for _ in range(length)] for length in (21, 100, 150)]


def tier(system: System):
    (replica,) = system.scheduler.core.replicas.values()
    return replica.disk_tier


async def until_written(system: System, count: int) -> None:
    async def is_written() -> bool:
        return tier(system).num_out >= count

    await eventually(is_written)


async def test_a_restart_reads_what_the_one_before_computed(model, tmp_path):
    """At most all whole blocks of the prompts: each has a token that a step computes. Some may be computed instead, if
    the disk was slow a moment before."""
    asked = prompts(1)
    expected = reference_generate(model, asked, COUNT)
    for life in range(2):
        server = MemoryServer()
        async with running(model, lambda server=server: MemoryBus(server), **settings(tmp_path)) as system:
            if life:
                await until_found(system)
            assert await system.generate(asked, max_tokens=COUNT) == expected
            await until_written(system, 0 if life else sum(len(prompt) // BLOCK for prompt in asked))
            most = sum((len(prompt) - 1) // BLOCK for prompt in asked)
            assert 0 < tier(system).num_in <= most if life else tier(system).num_in == 0
            assert tier(system).num_not_read == tier(system).num_not_written == 0


async def until_found(system: System) -> None:
    """Until the executor has said what its disk holds."""

    async def is_found() -> bool:
        return tier(system).pool.usage > 0

    await eventually(is_found)


@pytest.mark.parametrize("damage", ["cut", "changed", "deleted"])
async def test_damaged_files_cost_time_and_no_token(model, tmp_path, damage):
    """Each file is damaged between two lives: none is used."""
    asked = prompts(2)
    expected = reference_generate(model, asked, COUNT)
    for life in range(2):
        server = MemoryServer()
        async with running(model, lambda server=server: MemoryBus(server), **settings(tmp_path)) as system:
            if life:
                await until_found(system)
                harm(tmp_path, damage)
            assert await system.generate(asked, max_tokens=COUNT) == expected
            await until_written(system, 0 if life else sum(len(prompt) // BLOCK for prompt in asked))
            assert tier(system).num_in == 0
            assert (tier(system).num_not_read > 0) == bool(life)


def harm(folder: Path, damage: str) -> None:
    files = [*(folder / "cache" / "0" / "blocks").iterdir()]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        if damage == "deleted":
            file.unlink()
        else:
            file.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
