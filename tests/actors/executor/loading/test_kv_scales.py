"""Where the scales of a float8 cache come from, and what such a cache costs in quality."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.loading.kv_scales import calculate_scales, read_scales, set_kv_scales
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.families.experts import gpt_oss
from pagebus.actors.settings import Settings
from tests.actors.executor.loading import float8_quality
from tests.gpu.engine.cache_error import measure
from tests.helpers.model_factory import make_golden, make_model

LAYERS, KV_HEADS = 2, 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen3", seed=3)


def load(folder: Path, *, grouped: bool = False) -> Model:
    config = replace(ModelConfig.load(folder), grouped=grouped)
    model = build_model(config, torch.device("cpu"), torch.float32, Ops.reference())
    load_weights(model, folder, "auto", 0, lambda _: None)
    return model


def add_scales(folder: Path, scales: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {f"model.layers.{name}": tensor for name, tensor in scales.items()}, file)


@torch.inference_mode()
def scales_of(model: Model) -> torch.Tensor:
    return torch.stack([layer.attention.kv_scales for layer in model.layers])


def test_calculated_scales_are_powers_of_two(folder: Path) -> None:
    """Positive, the same every time, one per head, and not all alike."""
    scales = calculate_scales(load(folder))

    assert scales.shape == (LAYERS, 2, KV_HEADS)
    assert torch.equal(scales.log2(), scales.log2().round())
    assert torch.equal(scales, calculate_scales(load(folder)))
    assert len(scales.unique()) > 1


def test_calculated_scales_follow_the_model(folder: Path) -> None:
    """Values twice as large give scales twice as large, zeros give 1; keys keep theirs."""
    model = load(folder)
    values = model.parameters.views["model.layers.0.self_attn.v_proj.weight"]
    first = calculate_scales(model)[0]
    with torch.inference_mode():
        values.mul_(2)
    double = calculate_scales(model)[0]
    with torch.inference_mode():
        values.zero_()
    nothing = calculate_scales(model)[0]

    assert torch.equal(double, first * torch.tensor([[1.0], [2.0]]))
    assert torch.equal(nothing, torch.stack((first[0], torch.ones(KV_HEADS))))


def test_layers_with_pages_of_their_own_have_the_same_scales(tmp_path: Path) -> None:
    """However the layers are divided among pages."""
    folder = make_golden(tmp_path, "gpt_oss", gpt_oss.FAMILY.golden["gpt-oss"])
    whole, grouped = load(folder), load(folder, grouped=True)
    assert grouped.config.cache_groups.windowed_pages == 2
    assert torch.equal(calculate_scales(grouped), calculate_scales(whole))
    assert len(calculate_scales(whole).unique()) > 1


def test_scales_of_the_checkpoint_win(folder: Path) -> None:
    """One number for all heads, or one per head; also under the names of other tools."""
    add_scales(
        folder,
        {
            "0.self_attn.k_scale": torch.tensor(0.5),
            "0.self_attn.v_scale": torch.tensor([0.25]),
            "1.self_attn.k_proj.k_scale": torch.tensor([2.0, 3.0]),
            "1.self_attn.attn.v_scale": torch.tensor([4.0]).bfloat16(),
        },
    )
    model = load(folder)
    set_kv_scales(model, folder, Settings())

    assert scales_of(model).tolist() == [[[0.5, 0.5], [0.25, 0.25]], [[2.0, 3.0], [4.0, 4.0]]]


def test_scales_under_older_names(folder: Path) -> None:
    """compressed-tensors' outputs of projections, and one scale for keys and values."""
    add_scales(
        folder,
        {
            "0.self_attn.k_proj.output_scale": torch.tensor([0.5]),
            "0.self_attn.v_proj.output_scale": torch.tensor([0.25]),
            "1.self_attn.kv_scale": torch.tensor(3.0),
        },
    )
    model = load(folder)
    set_kv_scales(model, folder, Settings())

    assert scales_of(model).tolist() == [[[0.5, 0.5], [0.25, 0.25]], [[3.0, 3.0], [3.0, 3.0]]]


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ({"0.self_attn.k_scale": torch.tensor(0.5)}, "layer 0's v"),
        ({"0.self_attn.k_scale": torch.tensor([1.0, 1.0, 1.0])}, "no scale"),
        ({"0.self_attn.k_scale": torch.tensor(0.0)}, "no scale"),
        ({"1.self_attn.v_scale": torch.tensor(torch.nan)}, "no scale"),
    ],
)
def test_broken_scales_are_refused(scales: dict[str, torch.Tensor], said: str, folder: Path) -> None:
    """Missing, of another shape, zero or not a number: the text says which."""
    add_scales(folder, scales)

    with pytest.raises(ModelError, match=said):
        read_scales(load(folder), folder)


def test_without_scales_and_calculation_they_are_one(folder: Path) -> None:
    """As in vLLM, if --no-calculate-kv-scales asks for it."""
    plain, calculated = load(folder), load(folder)
    set_kv_scales(plain, folder, Settings(calculate_kv_scales=False))
    set_kv_scales(calculated, folder, Settings())

    assert torch.equal(scales_of(plain), torch.ones(LAYERS, 2, KV_HEADS))
    assert torch.equal(scales_of(calculated), calculate_scales(calculated))


def test_the_shipped_model_keeps_its_quality() -> None:
    """Perplexity over one byte per number is within 3% of the exact one, and few of the likeliest tokens change; in
    int8 the error is less than two thirds of that of fp8_e4m3."""
    samples = float8_quality.texts(8, 25)
    exact = float8_quality.measure(torch.float32, samples)
    float8, int8 = (float8_quality.measure(dtype, samples) for dtype in (torch.float8_e4m3fn, torch.int8))

    assert exact.logit_error == exact.divergence == 0
    for rounded in (float8, int8):
        assert 0 < rounded.logit_error < 0.1
        assert rounded.other_choice < 0.05
        assert rounded.perplexity < exact.perplexity * 1.03
    assert int8.logit_error < float8.logit_error * 2 / 3


def test_int8_is_nearly_as_exact_as_bfloat16() -> None:
    """Log probabilities of a model of random weights, in bfloat16 over each cache, against float32."""
    names = ("bf16", "fp8_e4m3", "int8")
    error = {name: row["mean"] for name, row in measure(400, 256, 2, torch.device("cpu"), names).items()}

    assert error["bf16"] < error["int8"] < 2 * error["bf16"]
    assert error["int8"] < error["fp8_e4m3"] / 2
