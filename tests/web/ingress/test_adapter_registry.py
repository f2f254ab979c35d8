"""The registry of adapters: several actors change it at once, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from pagebus.actors.settings import Settings
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import AdapterSource, JsonValue
from pagebus.web.http.errors import ApiError
from pagebus.web.ingress.adapter_registry import AdapterRegistry
from tests.helpers.lora.adapters import make_adapter
from tests.helpers.model_factory import make_model


class HeldBus(MemoryBus):
    """Every write waits until ``num_writers`` are about to write: each has read all that it will."""

    def __init__(self, server: MemoryServer, barrier: asyncio.Barrier) -> None:
        super().__init__(server)
        self._barrier = barrier

    async def put_row(self, table: str, row: str, value: Mapping[str, JsonValue], *, replace: bool = True) -> bool:
        await self._barrier.wait()
        return await super().put_row(table, row, value, replace=replace)

    async def delete_row(self, table: str, row: str) -> bool:
        await self._barrier.wait()
        return await super().delete_row(table, row)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama2", seed=3)


@pytest.fixture(scope="module")
def adapter(base: Path) -> str:
    return str(make_adapter(base / "adapter", base, seed=1))


def registries(base: Path, count: int) -> list[tuple[AdapterRegistry, dict[str, AdapterSource]]]:
    """Of several ingresses of one deployment, with what each knows."""
    server, barrier = MemoryServer(), asyncio.Barrier(count)
    settings = Settings(model=str(base), enable_lora=True)
    views: list[dict[str, AdapterSource]] = [{} for _ in range(count)]
    return [(AdapterRegistry(HeldBus(server, barrier), settings, view, ("base",)), view) for view in views]


async def test_names_loaded_and_unloaded_at_once(base: Path, adapter: str) -> None:
    pairs = registries(base, 3)
    await asyncio.gather(*(each.load(f"a{i}", adapter, in_place=False) for i, (each, _) in enumerate(pairs)))
    for registry, view in pairs:
        await registry.refresh()
        assert [*view] == ["a0", "a1", "a2"]
    first, second, third = (registry for registry, _ in pairs)
    await asyncio.gather(first.unload("a0"), second.unload("a1"), third.load("b", adapter, in_place=False))
    for registry, view in pairs:
        await registry.refresh()
        assert [*view] == ["a2", "b"]


async def test_one_of_those_who_take_a_name_gets_it(base: Path, adapter: str) -> None:
    pairs = registries(base, 4)
    loads = (each.load("sql", adapter, in_place=False) for each, _ in pairs)
    failures = [each for each in await asyncio.gather(*loads, return_exceptions=True) if each is not None]
    assert [type(each) for each in failures] == [ApiError] * 3
    assert all("has already been loaded" in str(each) for each in failures)
    unloads = await asyncio.gather(*(each.unload("sql") for each, _ in pairs), return_exceptions=True)
    assert sum(each is None for each in unloads) == 1
