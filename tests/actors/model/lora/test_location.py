"""Adapters on the hub: what is in the hub's cache is found by repository and commit, also where no hub is reached."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

from pagebus.actors.executor.adapters.reading import reader
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.errors import NoAdapter
from pagebus.actors.model.lora.location import locate
from pagebus.actors.settings import Settings
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import AdapterSource
from pagebus.web.http.errors import ApiError
from pagebus.web.ingress.adapter_registry import AdapterRegistry
from tests.helpers.lora.adapters import make_adapter
from tests.helpers.model_factory import make_model

COMMITS = ("1" * 40, "2" * 40)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama2", seed=3)


@pytest.fixture
def repository(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of org/sql as the hub's library caches it: links to files that are named by what they hold; `main` is the
    second of two commits."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    home = tmp_path / "models--org--sql"
    for seed, commit in enumerate(COMMITS):
        made = make_adapter(tmp_path / f"made-{seed}", base, seed=seed)
        (home / "blobs").mkdir(parents=True, exist_ok=True)
        (home / "snapshots" / commit).mkdir(parents=True)
        for file in made.iterdir():
            shutil.move(file, home / "blobs" / f"{seed}-{file.name}")
            (home / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{seed}-{file.name}")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMITS[1])
    return home


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(str(tmp_path)) == (tmp_path, "")
    assert locate("/org/sql") == (Path("/org/sql"), "")
    (tmp_path / "org" / "sql").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/sql") == (Path("org/sql"), "")


def test_a_repository_has_its_commit(repository: Path) -> None:
    assert locate("org/sql") == (repository / "snapshots" / COMMITS[1], f"org/sql@{COMMITS[1]}")
    assert locate(f"org/sql@{COMMITS[0]}") == (repository / "snapshots" / COMMITS[0], f"org/sql@{COMMITS[0]}")


@pytest.mark.parametrize("path", ["org/none", f"org/sql@{'3' * 40}", "org/sql@other"])
def test_what_the_hub_does_not_have(repository: Path, path: str) -> None:
    with pytest.raises(NoAdapter, match=r"adapter 'org/(none|sql)': no such folder, not in the local cache"):
        locate(path)


async def test_it_is_served_from_the_commit_that_was_loaded(base: Path, repository: Path) -> None:
    """Executors read that one, although the branch has gone on."""
    known: dict[str, AdapterSource] = {}
    settings = Settings(model=str(base), enable_lora=True)
    registry = AdapterRegistry(MemoryBus(MemoryServer()), settings, known, ("base",))
    (repository / "refs" / "main").write_text(COMMITS[0])
    await registry.load("sql", "org/sql", in_place=False)
    assert known["sql"].path == f"org/sql@{COMMITS[0]}"
    (repository / "refs" / "main").write_text(COMMITS[1])
    config = ModelConfig.load(base)
    assert reader(config, 16, torch.float32)(known["sql"])  # whose digest it compares
    with pytest.raises(ApiError, match="not in the local cache"):
        await registry.load("other", "org/other", in_place=False)
