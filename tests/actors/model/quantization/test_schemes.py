"""What configurations say of quantized weights: methods, lists of what is not quantized, fused products."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.model.config import ModelConfig, ModelError, parse_config
from pagebus.actors.model.family import WITH_IMAGES, NameMap
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.quantization.parsing import parse_quantization
from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.actors.settings import Settings
from pagebus.actors.shipped_model import __file__ as shipped

QKV = tuple(f"model.layers.3.self_attn.{part}_proj" for part in "qkv")
PLAIN = NameMap()


def parse(**fields: Any) -> Quantization:
    found = parse_quantization(fields, {})
    assert found is not None
    return found


def compressed(group: dict[str, Any], form: str, **more: Any) -> Quantization:
    groups = {"group_0": {"targets": ["Linear"], **group}}
    return parse(quant_method="compressed-tensors", format=form, config_groups=groups, **more)


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


INT4 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quant_method": "fp8"}, "fp8, e4m3, rows, dynamic activations"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
            "fp8, e4m3, blocks of 128x128, dynamic activations",
        ),
        ({"quant_method": "fbgemm_fp8"}, "fp8, e4m3, rows, dynamic activations"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8, e4m3, rows, static activations"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt_nvfp4, e2m1, groups of 16, static activations"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
            "gptq, 4 bits, groups of 128, act-order",
        ),
        (
            {"quant_method": "gptq", "bits": 3, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"},
            "gptq_v2, 3 bits, rows, zero points",
        ),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
            "awq, 4 bits, groups of 64, zero points",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "bnb_4bit, nf4, groups of 64",
        ),
        ({"load_in_8bit": True}, "bnb_int8, int8, rows"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}}},
            "torchao, e4m3, rows",
        ),
        (torchao("Int4WeightOnlyConfig", group_size=64), "torchao_int4, 4 bits, groups of 64, minima"),
        (
            torchao("Int8DynamicActivationIntxWeightConfig", weight_granularity={"_type": "PerAxis", "_data": {}}),
            "torchao, int8, rows, zero points, dynamic activations",
        ),
    ],
)
def test_methods(fields: dict[str, Any], said: str) -> None:
    """A scheme says in words what it is, as errors and ``pagebus inspect`` show it."""
    assert str(parse(**fields).default) == said


@pytest.mark.parametrize(
    ("group", "form", "said"),
    [
        (INT4, "pack-quantized", "ct_packed, 4 bits, groups of 128"),
        (
            {"weights": {**INT4["weights"], "actorder": "dynamic"}},
            "pack-quantized",
            "ct_packed, 4 bits, groups of 128, act-order",
        ),
        ({"weights": {**INT4["weights"], "actorder": "static"}}, "pack-quantized", "ct_packed, 4 bits, groups of 128"),
        (
            {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "input_activations": TOKENS},
            "int-quantized",
            "ct_plain, int8, rows, dynamic activations",
        ),
        (
            {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}},
            "float-quantized",
            "ct_plain, e4m3, blocks of 128x128",
        ),
        (
            {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
            "naive-quantized",
            "ct_plain, e4m3, rows",
        ),
        ({"weights": {"num_bits": 4, "type": "float"}}, "nvfp4-pack-quantized", "ct_nvfp4, e2m1, groups of 16"),
        ({"weights": {"num_bits": 4, "type": "float"}}, "mxfp4-pack-quantized", "ct_mxfp4, e2m1, groups of 32"),
    ],
)
def test_compressed_tensors(group: dict[str, Any], form: str, said: str) -> None:
    """The format may stand in the group, too, and counts before the outer one."""
    assert str(compressed(group, form).default) == said
    assert str(compressed({**group, "format": form}, "mixed-precision").default) == said


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quant_method": "quip"}, "quant_method 'quip' is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "gptq", "bits": 5}, "bits 5"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": "yes"}, "desc_act 'yes' is neither true nor false"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, r"'\(' is no regular expression"),
        ({"quant_method": "awq", "version": "gemv"}, r"version 'gemv' is not supported \(only gemm\)"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo 'W4A8'"),
        ({"quant_method": "bitsandbytes"}, "neither is true"),
        (torchao("Float8StaticActivationFloat8WeightConfig"), "'Float8StaticActivationFloat8WeightConfig' is not"),
        (torchao("Int4WeightOnlyConfig", int4_packing_format={"_data": "TILE_PACKED_TO_4D"}), "for a kernel"),
        (torchao("Int4WeightOnlyConfig", group_size=0), "group_size 0 is no group of columns"),
        (torchao("Int8WeightOnlyConfig", group_size=32), "group_size 32 is not supported"),
        (torchao("Int8WeightOnlyConfig", granularity={"_type": "PerToken"}), "granularity .* is not supported"),
        (torchao("IntxWeightOnlyConfig", granularity={"_type": "PerBlock", "_data": {"block_size": [2, 2]}}), "here"),
        (torchao("Float8WeightOnlyConfig", granularity={"_type": "PerBlock", "_data": {"block_size": 2}}), "no pair"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {}}}}, "weights"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config",
        ),
    ],
)
def test_what_is_not_read_is_named(fields: dict[str, Any], named: str) -> None:
    """By its field and value."""
    with pytest.raises(ModelError, match=named):
        parse(**fields).agreed(QKV, PLAIN)


def test_what_is_ignored_is_not_quantized() -> None:
    """Exact names, expressions, parts of names, stars."""
    by_name = compressed(INT4, "pack-quantized", ignore=["lm_head", QKV[0], QKV[1], QKV[2], "re:.*mlp.gate$"])
    assert by_name.agreed(QKV, PLAIN) is None
    assert by_name.scheme(["model.layers.4.mlp.gate"]) is None
    assert by_name.scheme(["model.layers.4.mlp.gate_proj"]) is not None
    by_part = parse(quant_method="fp8", modules_to_not_convert=["model.layers.1", "mlp.gate"])
    assert by_part.scheme(["model.layers.1.mlp.up_proj"]) is None
    assert by_part.scheme(["model.layers.10.mlp.gate_proj"]) is not None
    by_star = parse(quant_method="modelopt", quant_algo="FP8", exclude_modules=["model.layers.*.self_attn*", "lm_head"])
    assert by_star.agreed(QKV, PLAIN) is None
    assert by_star.scheme(["model.layers.3.mlp.down_proj"]) is not None


def test_entries_may_be_spelt_as_other_libraries_name_modules() -> None:
    """Fused products, and the names of a checkpoint with images."""
    fused = parse(quant_method="fp8", ignored_layers=["model.layers.3.self_attn.qkv_proj"])
    assert fused.agreed(QKV, PLAIN) is None
    tower = parse(quant_method="fp8", ignored_layers=["language_model.model.layers.3.self_attn"])
    assert tower.agreed(QKV, WITH_IMAGES) is None


def test_parts_of_a_product_must_agree() -> None:
    """The error names both, and both schemes."""
    mixed = parse(quant_method="gptq", bits=4, dynamic={r"+:.*k_proj": {"bits": 8}, r"-:.*down": {}})
    with pytest.raises(ModelError, match=r"q_proj and .*k_proj are one product .*: gptq, 4 bits.*, and gptq, 8 bits"):
        mixed.agreed(QKV, PLAIN)
    assert mixed.agreed(["model.layers.0.mlp.down_proj"], PLAIN) is None


def test_targets_choose_between_groups() -> None:
    """The first group that names a module, then that of all linear layers."""
    groups = {
        "group_0": {"targets": ["re:.*mlp.*"], **INT4, "format": "pack-quantized"},
        "group_1": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "strategy": "channel"},
            "format": "int-quantized",
        },
    }
    found = parse(quant_method="compressed-tensors", config_groups=groups)
    assert str(found.scheme(["model.layers.0.mlp.up_proj"])) == "ct_packed, 4 bits, groups of 128"
    assert str(found.agreed(QKV, PLAIN)) == "ct_plain, int8, rows"


def test_entries_that_mean_nothing_are_reported() -> None:
    """sglang#24929: a misspelt entry; heads, image towers and later layers of prediction are known."""
    entries = ["lm_head", "visual.blocks.0.attn.qkv", "mtp.layers.0", "model.layers.3.self_atn", "self_attn.q_proj"]
    found = parse(quant_method="fp8", modules_to_not_convert=entries)
    assert found.unmatched(QKV, WITH_IMAGES) == ["model.layers.3.self_atn"]


def test_files_beside_the_configuration(tmp_path: Path) -> None:
    """AWQ's, AutoGPTQ's and ModelOpt's; config.json counts first."""
    config = json.loads((Path(shipped).parent / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    side = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(side))
    found = ModelConfig.load(tmp_path).quantization
    assert found is not None
    assert str(found.default) == "awq, 4 bits, groups of 128, zero points"
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 8, "group_size": 64, "desc_act": False}))
    found = ModelConfig.load(tmp_path).quantization
    assert found is not None
    assert str(found.default) == "gptq, 8 bits, groups of 64"
    side = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    found = ModelConfig.load(tmp_path).quantization
    assert found is not None
    assert found.method == "modelopt"
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    found = ModelConfig.load(tmp_path).quantization
    assert found is not None
    assert found.method == "fp8"


def test_an_older_name_of_the_object() -> None:
    """neuralmagic's checkpoints of 2024 have it under ``compression_config``."""
    config = json.loads((Path(shipped).parent / "config.json").read_text())
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], **INT4}}}  # fmt: skip
    found = parse_config({**config, "compression_config": said}, {}).quantization
    assert found is not None
    assert str(found.default) == "ct_packed, 4 bits, groups of 128"


def test_the_flag(tmp_path: Path) -> None:
    """Left out: what the checkpoint says. Another method than its own is refused, other names of its own are not."""
    config = json.loads((Path(shipped).parent / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    dense = ModelConfig.load(tmp_path)
    assert with_quantization(Settings(), dense).quantization is None
    made = with_quantization(Settings(quantization="int4"), dense).quantization
    assert made is not None
    assert made.default == Scheme("online", "uint4", 4, (1, 128), zeros=True)
    with pytest.raises(
        ModelError, match="--quantization awq: the checkpoint is not quantized, and only fp8, int8, int4"
    ):
        with_quantization(Settings(quantization="awq"), dense)
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantized = ModelConfig.load(tmp_path)
    assert with_quantization(Settings(quantization="gptq_marlin"), quantized) == quantized
    with pytest.raises(ModelError, match="--quantization fp8: the checkpoint is quantized by gptq; leave the flag out"):
        with_quantization(Settings(quantization="fp8"), quantized)


def test_no_torch_is_imported() -> None:
    """All actors read the configuration."""
    code = "import sys, pagebus.actors.model.quantization.asked; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
