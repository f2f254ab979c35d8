"""The watched folder of adapters: what is copied there is served, what goes is not, and broken ones are told once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.contract import BusUnavailable
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import AdapterSource
from pagebus.web.ingress.adapter_folder import AdapterFolder
from pagebus.web.ingress.adapter_registry import AdapterRegistry
from tests.helpers.lora.adapters import make_adapter
from tests.helpers.model_factory import make_model


class Log:
    """What was told, as (event, adapter)."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def info(self, event: str, **fields: str) -> None:
        self.told.append((event, fields["adapter"]))

    error = info


class Watched:
    """A folder, what an ingress knows of it, and what it has told."""

    def __init__(self, folder: Path, base: Path, server: MemoryServer) -> None:
        self.view: dict[str, AdapterSource] = {}
        self.log = Log()
        settings = Settings(model=str(base), enable_lora=True)
        self.bus = MemoryBus(server)
        registry = AdapterRegistry(self.bus, settings, self.view, ("base",))
        self.adapters = AdapterFolder(str(folder), registry, self.log)
        self.registry = registry

    async def look(self, times: int = 2) -> list[tuple[str, str]]:
        """What these looks told."""
        self.log.told.clear()
        for _ in range(times):
            await self.adapters.look()
        return [*self.log.told]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama2", seed=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "watched").mkdir()
    return tmp_path / "watched"


@pytest.fixture
def watched(folder: Path, base: Path) -> Watched:
    return Watched(folder, base, MemoryServer())


async def test_an_adapter_comes_changes_and_goes(watched: Watched, folder: Path, base: Path, tmp_path: Path) -> None:
    assert await watched.look() == []
    make_adapter(folder / "sql", base, seed=1)
    assert await watched.look(1) == []  # perhaps it is being copied
    assert await watched.look(1) == [("adapter loaded", "sql")]
    first = watched.view["sql"]
    assert Path(first.path) == folder / "sql"
    assert await watched.look() == []

    shutil.rmtree(folder / "sql")
    make_adapter(folder / "sql", base, seed=2)
    assert await watched.look() == [("adapter loaded", "sql")]
    assert watched.view["sql"].digest != first.digest

    shutil.rmtree(folder / "sql")
    assert await watched.look(1) == [("adapter unloaded", "sql")]
    assert watched.view == {}


async def test_what_is_being_copied_waits(watched: Watched, folder: Path, base: Path, tmp_path: Path) -> None:
    """Each look sees more of it, and none takes it for a broken one."""
    whole = make_adapter(tmp_path / "whole", base, seed=1)
    (folder / "sql").mkdir()
    shutil.copy(whole / "adapter_config.json", folder / "sql")
    weights = (whole / "adapter_model.safetensors").read_bytes()
    for size in range(0, len(weights) + 1, len(weights) // 4):
        (folder / "sql" / "adapter_model.safetensors").write_bytes(weights[:size])
        assert await watched.look(1) == []
    (folder / "sql" / "adapter_model.safetensors").write_bytes(weights)
    assert await watched.look() == [("adapter loaded", "sql")]


async def test_a_link_that_is_pointed_elsewhere_is_another_version(
    watched: Watched, folder: Path, base: Path, tmp_path: Path
) -> None:
    for version in (1, 2):
        make_adapter(tmp_path / f"v{version}", base, seed=version)
    (folder / "sql").symlink_to(tmp_path / "v1")
    assert await watched.look() == [("adapter loaded", "sql")]
    (tmp_path / "new").symlink_to(tmp_path / "v2")
    os.replace(tmp_path / "new", folder / "sql")
    assert await watched.look() == [("adapter loaded", "sql")]
    assert Path(watched.view["sql"].path) == tmp_path / "v2"
    (folder / "sql").unlink()
    assert await watched.look(1) == [("adapter unloaded", "sql")]


async def test_a_broken_one_is_told_once_and_harms_no_other(watched: Watched, folder: Path, base: Path) -> None:
    for name in ("bad", "base", "good"):
        make_adapter(folder / name, base, seed=1)
    (folder / "bad" / "adapter_config.json").write_text("{")
    make_adapter(folder / ".hidden", base, seed=1)
    (folder / "notes.txt").touch()
    told = [("adapter refused", "bad"), ("adapter refused", "base"), ("adapter loaded", "good")]
    assert await watched.look() == told  # the model itself is called base
    assert await watched.look(4) == []
    assert [*watched.view] == ["good"]


async def test_names_of_other_bytes_than_utf8_are_refused(
    watched: Watched, folder: Path, base: Path, tmp_path: Path
) -> None:
    """As those of any folder's files may be; also where only a link's end is called so."""
    odd = os.fsdecode(b"odd-\xff")
    make_adapter(folder / "whole", base, seed=1)
    shutil.copytree(folder / "whole", folder / odd)
    shutil.copytree(folder / "whole", tmp_path / odd)
    (folder / "link").symlink_to(tmp_path / odd)
    told = {("adapter refused", odd), ("adapter refused", "link"), ("adapter loaded", "whole")}
    assert set(await watched.look()) == told
    assert await watched.look() == []
    assert [*watched.view] == ["whole"]


async def test_names_of_others_are_left_alone(watched: Watched, folder: Path, base: Path, tmp_path: Path) -> None:
    await watched.registry.load("mine", str(make_adapter(tmp_path / "mine", base, seed=1)), in_place=False)
    await watched.look()
    assert [*watched.view] == ["mine"]


async def test_after_a_restart_what_went_meanwhile_goes(folder: Path, base: Path) -> None:
    server = MemoryServer()
    make_adapter(folder / "sql", base, seed=1)
    await Watched(folder, base, server).look()
    shutil.rmtree(folder / "sql")
    again = Watched(folder, base, server)
    await again.registry.refresh()
    assert await again.look(1) == [("adapter unloaded", "sql")]


async def test_two_ingresses_agree(folder: Path, base: Path) -> None:
    server = MemoryServer()
    both = [Watched(folder, base, server) for _ in range(2)]
    make_adapter(folder / "sql", base, seed=1)
    for each in both:
        await each.look()
    shutil.rmtree(folder / "sql")
    for each in both:
        await each.look()
        await each.registry.refresh()
    assert [each.view for each in both] == [{}, {}]


async def test_without_a_bus_it_is_tried_again(
    watched: Watched, folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(folder / "sql", base, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(watched.bus, "put_row", _unavailable)
        with pytest.raises(BusUnavailable):
            await watched.look()
    assert await watched.look(1) == [("adapter loaded", "sql")]


async def _unavailable(*_: object, **__: object) -> bool:
    raise BusUnavailable("no bus")


def test_there_must_be_such_a_folder(tmp_path: Path, base: Path) -> None:
    with pytest.raises(SettingsError, match=r"--lora-resolver-cache-dir .*: No such file"):
        Watched(tmp_path / "none", base, MemoryServer())
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"--lora-resolver-cache-dir .*: Not a directory"):
        Watched(tmp_path / "file", base, MemoryServer())
