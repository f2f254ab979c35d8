"""Random adapters for benchmarks."""

from __future__ import annotations

from pathlib import Path

import pagebus.actors.shipped_model
from pagebus.actors.bench.driver.loras import write_adapters
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import open_adapter
from pagebus.actors.model.lora.projections import projections

MODEL = ModelConfig.load(Path(pagebus.actors.shipped_model.__file__).parent)


def test_all_projections_are_adapted(tmp_path: Path) -> None:
    """Each adapter has every module at the rank asked for, and a digest of its own; the weights are there once."""
    sources = write_adapters(tmp_path / "loras", MODEL, 3, 4)
    assert [source.name for source in sources] == ["lora-0", "lora-1", "lora-2"]
    assert len({source.digest for source in sources}) == 3
    adapters = [open_adapter(Path(source.path), MODEL, 4) for source in sources]
    modules = {module for projection in projections(MODEL) for module in projection.modules}
    assert all(each.rank == 4 and each.shape.modules.keys() == modules for each in adapters)
    assert len({(adapter.folder / "adapter_model.safetensors").stat().st_ino for adapter in adapters}) == 1
