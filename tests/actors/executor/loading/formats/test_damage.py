"""Damaged and contradictory checkpoints end in one clear error, whatever is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagebus.actors.model.config import ModelError
from tests.actors.executor.loading.formats.test_pitfalls import load
from tests.grids import examples
from tests.helpers.model_factory import make_model
from tests.helpers.quantized.checkpoints import change, noise, quantize, tensors_of, write
from tests.helpers.quantized.layouts import read
from tests.helpers.quantized.packers import (
    PACKERS,
    Packer,
    Tensors,
    awq,
    bnb_4bit,
    bnb_int8,
    ct_fp8,
    ct_int8,
    ct_mxfp4,
    ct_packed,
    fp8,
    gptq,
    nvfp4,
)

MODULE = "model.layers.1.mlp.down_proj"
DTYPES = (torch.float32, torch.float16, torch.int32, torch.int8, torch.uint8, torch.float64, torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("m") / "model", "llama3", seed=1, hidden_size=64, intermediate_size=64)


@pytest.fixture(scope="module")
def checkpoints(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: quantize(model, tmp_path_factory.mktemp(name), PACKERS[name])[0] for name in PACKERS}


def damage(tensors: Tensors, name: str, kind: str, draw: st.DataObject) -> None:
    """One tensor is gone, of another format or shape, or full of strange numbers."""
    tensor = tensors[name]
    if kind == "gone":
        del tensors[name]
    elif kind == "dtype":
        dtype = draw.draw(st.sampled_from([each for each in DTYPES if each != tensor.dtype]))
        tensors[name] = torch.zeros(tensor.shape, dtype=dtype)
    elif kind == "shape":
        shape = draw.draw(st.lists(st.integers(0, 5), max_size=3))
        tensors[name] = torch.zeros(shape, dtype=torch.float32).to(tensor.dtype)
    else:
        size = tensor.numel() * tensor.element_size()
        data = draw.draw(st.sampled_from([b"\xff", b"\x7f", b"\x80", b"\x00"])) * size
        tensors[name] = torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_a_damaged_module_is_read_or_named(
    draw: st.DataObject, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Never another kind of error, and never a hang: what is read has no numbers that are none."""
    packer = draw.draw(st.sampled_from(sorted(PACKERS)))
    folder = checkpoints[packer]
    tensors = tensors_of(folder)
    name = draw.draw(st.sampled_from(sorted(each for each in tensors if each.startswith(MODULE))))
    kind = draw.draw(st.sampled_from(["gone", "dtype", "shape", "bytes"]))
    damage(tensors, name, kind, draw)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    damaged = write(tmp_path_factory.mktemp("damaged") / "model", folder, tensors, config)
    said = ""
    try:
        weight = load(damaged).layers[1].mlp.down.weight  # type: ignore[union-attr]
    except ModelError as error:
        said = str(error)
    assert MODULE in said or (not isinstance(weight, torch.Tensor) and bool(weight.dense().isfinite().all()))


SIZED: dict[str, Callable[[int], Packer]] = {
    "gptq": lambda group: gptq(4, group, sym=False, act_order=True), "gptq-2": lambda group: gptq(2, group, sym=True),
    "awq": awq, "ct-5": lambda group: ct_packed(5, group, sym=False),
    "ct-3": lambda group: ct_packed(3, group, sym=True),
    "fp8": lambda group: fp8(), "fp8-blocks": fp8, "ct-int8": lambda group: ct_int8(), "ct-fp8": lambda group: ct_fp8(),
    "mxfp4": lambda group: ct_mxfp4(), "nvfp4": lambda group: nvfp4(modelopt=True),
    "bnb-int8": lambda group: bnb_int8(), "bnb": lambda group: bnb_4bit("nf4", nested=True),
}  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(sorted(SIZED)), eights=st.integers(1, 6), groups=st.integers(1, 5),
    group=st.sampled_from([16, 32, 64]),
)  # fmt: skip
def test_shapes_of_all_kinds(name: str, eights: int, groups: int, group: int) -> None:
    """Rows by eights (AWQ's words), columns by groups; 64 divides the rows of bitsandbytes, 32 of MXFP4."""
    columns = group * groups * (4 if name in ("mxfp4", "nvfp4", "bnb", "gptq-2") else 1)
    columns = columns * 2 if name in ("gptq", "awq") and columns % 32 else columns
    layout, dense = read(SIZED[name](group), noise(8 * eights, columns))
    torch.testing.assert_close(layout.dense(), dense, rtol=3e-7, atol=0)


def test_a_weight_that_is_not_quantized_although_it_should_be(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """An ignore list that does not list it."""
    tensors = tensors_of(checkpoints["gptq-4"])
    for name in [name for name in tensors if name.startswith(MODULE)]:
        del tensors[name]
    tensors[f"{MODULE}.weight"] = torch.zeros(64, 64)
    folder = write(tmp_path / "model", checkpoints["gptq-4"], tensors, dict(PACKERS["gptq-4"].config))
    with pytest.raises(ModelError, match=r"down_proj\.weight is not quantized \(F32\), but is by .* \(gptq, 4 bits"):
        load(folder)


def test_a_missing_scale_is_named_with_its_scheme(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Before anything is read."""
    tensors = tensors_of(checkpoints["ct-fp8"])
    del tensors[f"{MODULE}.weight_scale"]
    folder = write(tmp_path / "model", checkpoints["ct-fp8"], tensors, dict(PACKERS["ct-fp8"].config))
    with pytest.raises(ModelError, match=r"lack tensor .*down_proj\.weight_scale, .* \(ct_plain, e4m3, rows\)"):
        load(folder)


def test_a_cut_off_file_is_refused(checkpoints: dict[str, Path], model: Path, tmp_path: Path) -> None:
    """As with weights that are not quantized."""
    folder = write(tmp_path / "model", model, tensors_of(checkpoints["awq"]), dict(PACKERS["awq"].config))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load(folder)


def test_tensors_that_no_module_has_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Another format's, beside the right ones."""
    folder = write(tmp_path / "model", checkpoints["awq"], tensors_of(checkpoints["awq"]), dict(PACKERS["awq"].config))
    change(folder, lambda tensors: tensors.update({f"{MODULE}.weight_scale": torch.ones(1)}))
    with pytest.raises(ModelError, match=r"hold tensor .*down_proj\.weight_scale, which"):
        load(folder)
