"""Executors of one deployment serve one model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagebus.actors.executor.ranks.same_model import SameModel
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer


def folder(path: Path, config: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    return path


async def test_the_same_model_in_another_folder(tmp_path: Path) -> None:
    """It is told by its configuration, and so is one of an executor that does not say."""
    bus = MemoryBus(MemoryServer())
    first = SameModel(bus, Settings())
    await first.confirm(folder(tmp_path / "a", "{}"))
    await bus.acquire_lease("executor", "executor-0", first.told, ttl_s=60)
    await bus.acquire_lease("executor", "executor-1", {}, ttl_s=60)
    second = SameModel(bus, Settings())
    await second.confirm(folder(tmp_path / "b", "{}"))
    assert second.told == first.told != {}


async def test_another_model_is_refused(tmp_path: Path) -> None:
    """With the way out; it has told nobody of its model by then."""
    bus = MemoryBus(MemoryServer())
    await bus.acquire_lease("executor", "executor-0", {"model": "other"}, ttl_s=60)
    same = SameModel(bus, Settings(name="here", lease_ttl_s=0.2))
    with pytest.raises(SettingsError, match=r"executor-0 of the deployment 'here' serves another model .* --name"):
        await same.confirm(folder(tmp_path / "a", "{}"))
    assert same.told == {}


async def test_a_deployment_that_has_ended(tmp_path: Path) -> None:
    """Its leases run out, and then its name is free for another model."""
    bus = MemoryBus(MemoryServer())
    await bus.acquire_lease("executor", "executor-0", {"model": "other"}, ttl_s=0.3)
    same = SameModel(bus, Settings())
    await same.confirm(folder(tmp_path / "a", "{}"))
    assert same.told != {}
