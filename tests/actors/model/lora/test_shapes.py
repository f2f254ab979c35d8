"""What a header says is worked out once, and holds for no other file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pagebus.actors.shipped_model
from pagebus.actors.bench.driver.loras import write_adapters
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora import adapter
from pagebus.actors.model.lora.adapter import CONFIG, WEIGHTS, AdapterFolders, digest_of, open_adapter
from pagebus.actors.model.lora.errors import AdapterError

MODEL = ModelConfig.load(Path(pagebus.actors.shipped_model.__file__).parent)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three adapters whose files have equal headers."""
    return [Path(each.path) for each in write_adapters(tmp_path / "loras", MODEL, 3, 4)]


def change(folder: Path, **fields: object) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_adapters_that_differ_in_scales_share_their_shape(folders: list[Path]) -> None:
    """Each has its own scales, and its own digest: the one that it has when it is opened alone."""
    opener = AdapterFolders(MODEL, 4)
    change(folders[1], alpha_pattern={"q_proj": 1.0})
    opened = [opener.open(each) for each in folders]
    assert len({each.shape for each in opened}) == 1
    assert len({tuple(each.scales().values()) for each in opened}) == 3
    assert [digest_of(each) for each in opened] == [digest_of(open_adapter(each, MODEL, 4)) for each in folders]


def test_files_that_only_look_alike_are_refused(folders: list[Path]) -> None:
    """One has another rank in its configuration, and one lost its end."""
    opener = AdapterFolders(MODEL, 8)
    shape = opener.open(folders[0]).shape
    change(folders[1], r=8)
    with pytest.raises(AdapterError, match="rank and model ask for"):
        opener.open(folders[1])
    weights = (folders[2] / WEIGHTS).read_bytes()
    (folders[2] / WEIGHTS).unlink()  # the others link it
    (folders[2] / WEIGHTS).write_bytes(weights[:-2])
    with pytest.raises(AdapterError, match="is not complete"):
        opener.open(folders[2])
    assert opener.open(folders[0]).shape is shape


def test_only_so_many_headers_are_remembered(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one used longest ago is forgotten first, and the last one never is."""
    (other,) = write_adapters(tmp_path / "others", MODEL, 1, 2)
    opener = AdapterFolders(MODEL, 4)
    first, second = opener.open(folders[0]).shape, opener.open(Path(other.path)).shape
    assert opener.open(folders[0]).shape is first
    monkeypatch.setattr(adapter, "MOST_KNOWN_BYTES", 1)
    assert opener.open(folders[0]).shape is first
    monkeypatch.undo()
    assert opener.open(Path(other.path)).shape is not second
