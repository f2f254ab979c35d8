"""``pagebus inspect`` says what a model is made of, before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.commands.cli import main
from tests.actors.model.pooling.tiny_models import make_encoder, write_modules
from tests.helpers.model_factory import make_golden, make_model
from tests.helpers.quantized.checkpoints import change, quantize
from tests.helpers.quantized.packers import PACKERS

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}
FIELDS = {"hidden_size": 64, "intermediate_size": 128}
EXPERTS_DOWN = "model.layers.*.mlp.experts.down_proj"


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
    assert (found["kv_cache"]["window"], found["kv_cache"]["sequence_blocks"]) == (0, 512 // 16)
    assert "attention" in found["runs"]


@pytest.mark.parametrize(
    "option", ["--memory-gib=nan", "--memory-gib=inf", "--memory-gib=0", "--multiprocessors=-5", "--memory-gb-per-s=-5"]
)
def test_a_gpu_that_cannot_be_is_refused(model: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    """In one line, which names the option."""
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(model), "--target", "sm_90", option])
    assert ended.value.code == 2
    assert option.partition("=")[0] in capsys.readouterr().err


def test_products_of_sentence_transformers_lie_in_folders_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are looked for there, as a start does."""
    folder = make_encoder(tmp_path / "model", "bert")
    write_modules(folder, "mean", dense=8)
    found = inspect(capsys, folder, "--target", "cpu")
    assert found["files"] == "complete"
    assert "2_Dense.linear.weight" in {group["name"] for group in found["weights"]}


def test_a_rank_has_whole_experts_or_a_part_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 8 experts 4, of their shape in the file."""
    folder = make_golden(tmp_path, "qwen3_moe", FIELDS | MOE)
    found = [
        {group["name"]: group for group in inspect(capsys, folder, "--target", "cpu", "-tp", "2", *more)["weights"]}
        for more in ((), ("-ep",))
    ]
    assert [(each[EXPERTS_DOWN]["count"], each[EXPERTS_DOWN]["shape"]) for each in found] == [
        (2, [8, 64, 16]), (2, [4, 64, 32]),
    ]  # fmt: skip


def test_windows_bound_what_a_sequence_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The window and a step's tokens, not the whole context."""
    folder = make_model(tmp_path / "model", "mistral", seed=1, **FIELDS, sliding_window=24)
    options = "--target", "cpu", "--max-num-batched-tokens", "32"
    cache = inspect(capsys, folder, *options)["kv_cache"]
    assert (cache["window"], cache["sequence_blocks"]) == (24, (24 + 32 + 16 - 3) // 16 + 1)
    assert main(["inspect", str(folder), *options]) == 0
    assert "in at most 5 blocks, as all layers have windows of at most 24 tokens" in capsys.readouterr().out


def test_windows_in_some_layers_bound_their_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All pages of layers without a window, and the window's of the others; unless the flag keeps all together."""
    fields = {"num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 2}
    folder = make_golden(tmp_path / "model", "gemma3_text", fields)
    options = "--target", "cpu", "--max-num-batched-tokens", "32"
    cache = inspect(capsys, folder, *options)["kv_cache"]
    whole = inspect(capsys, folder, *options, "--disable-hybrid-kv-cache-manager")["kv_cache"]
    assert (cache["windowed_pages"], whole["windowed_pages"], whole["window"]) == (1, 0, 0)
    assert cache["block_bytes"] * 2 == whole["block_bytes"]
    assert cache["bytes_per_token"] == whole["bytes_per_token"]
    assert cache["sequence_blocks"] == whole["sequence_blocks"] + (24 + 32 + 16 - 3) // 16 + 1
    assert main(["inspect", str(folder), *options]) == 0
    assert "as 1 of 2 pages of a block have windows of at most 24 tokens" in capsys.readouterr().out


def test_a_draft_model_takes_its_part_of_a_block(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As much as the model, if it is the same; so the cache has half as many blocks."""
    options = ["--target", "cpu", "--kv-cache-memory-bytes", "64M"]
    alone = inspect(capsys, model, *options)["kv_cache"]
    told = ["--spec-method", "draft_model", "--spec-model", str(model), "--spec-tokens", "2"]
    both = inspect(capsys, model, *options, *told)["kv_cache"]
    assert both["block_bytes"] == 2 * alone["block_bytes"]
    assert both["most_blocks"] == alone["most_blocks"] // 2


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
    runs = inspect(capsys, folder, "--target", "sm_90", "--dtype", "bfloat16")["runs"]
    assert runs["qkv"] == "skinny_gemm 1 to 256, dequantized from 257 tokens"
    assert "dequantized" not in runs["lm_head"]


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


def test_a_quantized_model_is_explained(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the kernel, its launch shape and where the choice comes from; heads are not quantized."""
    folder, _ = quantize(model, tmp_path, PACKERS["fp8"])
    assert main(["explain", str(folder), "--target", "sm_90", "--dtype", "bfloat16", "--json"]) == 0
    steps = {step["step"]: step["products"] for step in json.loads(capsys.readouterr().out)["steps"]}
    assert steps["decode 8"]["qkv"]["kernel"] == "skinny_gemm"
    assert steps["decode 8"]["qkv"]["source"] == "rule"
    assert steps["decode 8"]["o"]["form"] == "residual"
    runs = inspect(capsys, folder, "--target", "sm_90", "--dtype", "bfloat16")["runs"]
    assert runs["gate_up"] == "gemv 1, skinny_gemm 2 to 64, scaled_mm from 65 tokens"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantized_experts_are_explained(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each product with its launch shape; in float32 a layer is dequantized at a time."""
    model = make_golden(tmp_path / "model", "qwen3_moe", MOE)
    options = ("--quantization", "int8", "--target", "sm_90", "--dtype", dtype)
    kernel = "moe_coded" if dtype == "bfloat16" else "moe_dequantized"
    assert main(["explain", str(model), "--json", *options]) == 0
    steps = {step["step"]: step["products"] for step in json.loads(capsys.readouterr().out)["steps"]}
    assert steps["decode 8"]["experts"]["kernel"] == kernel
    assert steps["decode 8"]["experts"]["config"]["down"]["depth"] > 0
    assert inspect(capsys, model, *options)["runs"]["experts"] == kernel
