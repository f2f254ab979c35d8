"""What a container's health check sees of an actor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pagebus.actors.runtime.actor import Actor
from pagebus.actors.settings import Settings
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.bus.streams import Names
from tests.helpers.waiting import until


class Idle(Actor):
    """Works once it is let."""

    kind = "idle"

    def __init__(self, path: Path, server: MemoryServer, name: str) -> None:
        settings = Settings(health_file=str(path), lease_ttl_s=0.2)
        super().__init__(settings, MemoryBus(server, Names("pagebus")), name)
        self.let = asyncio.Event()

    def lease_name(self) -> str:
        return "only"

    async def start(self) -> None:
        await self.let.wait()

    async def serve(self) -> None:
        await self.draining.wait()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "well"


def touched_ns(path: Path) -> int:
    """When the file was touched last; 0 if there is none."""
    return path.stat().st_mtime_ns if path.exists() else 0


async def test_the_file_is_there_while_the_actor_is_well(file: Path) -> None:
    """Not before it is ready; touched again and again then; gone once it has ended."""
    actor = Idle(file, MemoryServer(), "a")
    run = asyncio.create_task(actor.run())
    await until(lambda: actor.epoch)
    taken_s = actor._renewed_s
    await until(lambda: actor._renewed_s > taken_s)
    assert touched_ns(file) == 0

    actor.let.set()
    await until(lambda: touched_ns(file))
    first_ns = touched_ns(file)
    await until(lambda: touched_ns(file) > first_ns)

    actor.request_drain()
    await run
    assert touched_ns(file) == 0


async def test_a_standby_is_well(tmp_path: Path) -> None:
    """It does what it has to do: wait for the lease that another one holds."""
    server = MemoryServer()
    leader, standby = (Idle(tmp_path / name, server, name) for name in ("leader", "standby"))
    runs = [asyncio.create_task(leader.run())]
    await until(lambda: leader.epoch)
    runs.append(asyncio.create_task(standby.run()))
    await until(lambda: touched_ns(tmp_path / "standby"))
    assert touched_ns(tmp_path / "leader") == 0  # it starts still
    for actor in (standby, leader):
        actor.request_drain()
    await asyncio.gather(*runs)


async def test_a_file_that_cannot_be_written_hurts_nobody(tmp_path: Path) -> None:
    """The actor works, and its check fails."""
    actor = Idle(tmp_path / "no" / "such" / "folder", MemoryServer(), "a")
    actor.let.set()
    run = asyncio.create_task(actor.run())
    await until(lambda: actor.state == "ready")
    actor.request_drain()
    await run
