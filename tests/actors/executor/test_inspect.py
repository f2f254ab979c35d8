"""``pagebus inspect`` says what a model is made of, before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.commands.cli import main
from tests.helpers.model_factory import make_model
from tests.helpers.quantized.checkpoints import change, quantize
from tests.helpers.quantized.packers import PACKERS

FIELDS = {"hidden_size": 64, "intermediate_size": 128}


def inspect(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> dict[str, Any]:
    assert main(["inspect", str(folder), "--json", *options]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("m") / "model", "llama3", seed=1, **FIELDS)


def test_a_dense_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights by what they are called, their numbers and bytes, and the kernels that would run."""
    found = inspect(capsys, model, "--target", "sm_90", "--memory-gib", "80")
    names = {group["name"]: group for group in found["weights"]}
    down = names["model.layers.*.mlp.down_proj.weight"]
    assert (down["count"], down["shape"], down["format"]) == (2, [64, 128], "float32")
    assert (down["parameters"], down["bytes"]) == (2 * 64 * 128, 8 * 64 * 128)
    assert sum(group["bytes"] for group in found["weights"]) == found["bytes"]
    assert found["files"] == "complete"
    assert found["kv_cache"]["bytes_per_token"] == 2 * 2 * 2 * 64 * 4
    assert found["kv_cache"]["most_blocks"] > 1_000_000
    assert "attention" in found["runs"]


def test_a_quantized_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Schemes and layouts; the head is not quantized; a misspelt entry is shown."""
    folder, _ = quantize(model, tmp_path, PACKERS["awq"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_heat"]
    (folder / "config.json").write_text(json.dumps(config))
    found = inspect(capsys, folder, "--target", "cpu")
    down = next(group for group in found["weights"] if group["name"].endswith("down_proj"))
    assert (down["format"], down["layout"]) == ("awq, 4 bits, groups of 16, zero points", "W4Words")
    assert down["bytes"] == 2 * (64 * 128 // 2 + 64 * 128 // 16 * (4 + 1))
    assert found["quantization"] == "awq"
    assert found["unmatched_entries"] == ["lm_heat"]
    assert found["runs"] == {"products": "with dequantized weights, on the CPU"}
    assert "refused" in inspect(capsys, folder, "--target", "sm_90")["runs"]["products"]


def test_weights_made_at_load(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``--quantization`` would make of a checkpoint."""
    found = inspect(capsys, model, "--quantization", "int8", "--target", "cpu")
    formats = {group["format"] for group in found["weights"] if "proj" in group["name"]}
    assert formats == {"online, int8, rows, dynamic activations"}


def test_files_that_lack_a_tensor(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error that a start would end with."""
    folder, _ = quantize(model, tmp_path, PACKERS["fp8"])
    change(folder, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale"))
    assert "lack tensor model.layers.0.mlp.up_proj.weight_scale" in inspect(capsys, folder)["files"]


def test_a_table_for_people(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each kind of weight."""
    assert main(["inspect", str(model), "--quantization", "int4", "--target", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM, int4" in said
    assert "online, 4 bits, groups of 128, zero points" in said
    assert "model.layers.*.mlp.down_proj" in said


def test_a_quantized_model_is_refused_on_a_gpu(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So far: with one clear error, before anything is loaded."""
    folder, _ = quantize(model, tmp_path, PACKERS["fp8"])
    assert main(["explain", str(folder), "--target", "sm_90"]) == 2
    assert "quantized (fp8): so far they are computed on a CPU only (--device cpu)" in capsys.readouterr().err
