"""Random weights are made in the layouts themselves, to measure quantized models without a download."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.loading.weights import DUMMY_RANGE, fill_with_noise
from pagebus.actors.executor.models import build_model
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.gguf.types import BY_NAME
from pagebus.actors.model.quantization.asked import ONLINE, with_quantization
from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.quantization.scheme import Scheme, mixed
from pagebus.actors.settings import Settings
from pagebus.kernels.quantized.coding import experts_kind_of
from pagebus.kernels.quantized.layouts import W4Words, W8Blocks, W8Rows, num_bytes, tensors_of
from tests.helpers.model_factory import make_model
from tests.helpers.quantized.layouts import CPU
from tests.helpers.quantized.packers import PACKERS

FIELDS = {"hidden_size": 128, "intermediate_size": 256}
GGUF = {name: kind.scheme for name, kind in BY_NAME.items() if kind.scheme is not None}
SCHEMES: dict[str, Scheme] = {**ONLINE, **GGUF, "mixed": mixed([GGUF["Q4_K"], GGUF["Q6_K"]])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("dummy") / "model", "llama3", seed=1, **FIELDS)


def check(parameters: Parameters) -> None:
    """All layouts have weights of either sign, as large as dense dummy weights, and different ones."""
    for layout in parameters.layouts:
        dense = layout.dense()
        assert bool(dense.isfinite().all())
        assert DUMMY_RANGE / 3 < dense.abs().max() < 3 * DUMMY_RANGE
        assert (dense > 0).any()
        assert (dense < 0).any()
        assert len(dense.unique()) > 8


@torch.inference_mode()
@pytest.mark.parametrize("name", SCHEMES)
def test_each_layout(name: str, folder: Path) -> None:
    """Nothing is left as memory was; the same seed gives the same."""
    quantization = Quantization(name, SCHEMES[name], online=True)
    config = ModelConfig.load(folder)
    found = []
    for garbage in (0, 77):
        model = build_model(type(config)(**_fields(config, quantization)), CPU, torch.float32, Ops.reference(), 32)
        for layout in model.parameters.layouts:
            for tensor in tensors_of(layout):
                tensor.view(torch.uint8).fill_(garbage)
        fill_with_noise(model, seed=3)
        check(model.parameters)
        found.append(torch.cat([layout.dense().flatten() for layout in model.parameters.layouts]))
    assert torch.equal(*found)


def _fields(config: ModelConfig, quantization: Quantization) -> dict[str, object]:
    return {name: getattr(config, name) for name in ModelConfig.__slots__} | {"quantization": quantization}


@torch.inference_mode()
@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-4-act-order", "awq", "ct-nvfp4", "bnb-nf4", "torchao-int4"])
def test_configurations_that_say_so(name: str, folder: Path, tmp_path: Path) -> None:
    """As a checkpoint has them: zero points, orders, tables and small scales too."""
    said = json.loads((folder / "config.json").read_text()) | {"quantization_config": PACKERS[name].config}
    (tmp_path / "config.json").write_text(json.dumps(said))
    model = build_model(ModelConfig.load(tmp_path), CPU, torch.float32, Ops.reference(), 32)
    fill_with_noise(model, seed=3)
    assert model.parameters.layouts
    check(model.parameters)


@pytest.mark.parametrize(
    ("method", "kind", "share"), [("fp8", W8Rows, 1.0), ("int8", W8Rows, 1.0), ("int4", W4Words, 0.55)]
)
def test_the_published_shapes(method: str, kind: type, share: float, tmp_path: Path) -> None:
    """The layouts of an 8B model at their places and sizes, without memory for them."""
    plain = ModelConfig.load(write_model_folder("llama8b", tmp_path))
    config = with_quantization(Settings(quantization=method), plain)
    assert "llama8b" in SHAPES
    model = build_model(config, torch.device("meta"), torch.bfloat16, Ops.reference(), 32)
    layouts = model.parameters.layouts
    assert {type(layout) for layout in layouts} == {kind}
    assert not any(isinstance(layout, W8Blocks) for layout in layouts)
    assert len(layouts) == 4 * config.num_layers
    dense = 2 * 2 * config.vocab_size * config.hidden_size
    weights = config.spec.layer_weights()
    assert 0.95 * share * weights < model.parameters.num_bytes() - dense < 1.05 * share * weights


def test_the_published_experts(tmp_path: Path) -> None:
    """gpt-oss-20b as it is downloaded: 4.25 bits of each weight of its experts, up to the last tile of a row."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["gptoss20b-mxfp4"] | {"num_hidden_layers": 1}))
    model = build_model(ModelConfig.load(tmp_path), torch.device("meta"), torch.bfloat16, Ops.reference(), 32)
    layouts, weights = model.parameters.layouts, 3 * 32 * 2880 * 2880
    assert len(layouts) == 2
    assert 4.25 / 8 * weights < sum(map(num_bytes, layouts)) < 4.5 / 8 * weights
    kinds = [experts_kind_of(layout) for layout in layouts]
    assert [kind.name for kind in kinds if kind is not None] == ["fp4-1x32"] * 2
