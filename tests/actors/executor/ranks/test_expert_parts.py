"""Loading the experts of ranks: each has its own, whole and to the bit, and reads no byte of another's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.moe import MixtureOfExperts
from pagebus.actors.executor.loading import weight_copy
from pagebus.actors.executor.loading.weights import load_weights, own_parts, read_headers
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.executor.models.decoder import as_decoder
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.shards.local import local_config
from pagebus.actors.settings import Settings
from tests.actors.executor.loading.formats.test_gpt_oss import small_gpt_oss
from tests.actors.executor.ranks.test_expert_parallel import golden
from tests.helpers.model_factory import make_golden
from tests.helpers.quantized.checkpoints import PRODUCTS, quantize
from tests.helpers.quantized.packers import PACKERS

FIELDS = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
}  # fmt: skip
WORLD = 2


def loaded(
    folder: Path, rank: int, world: int = WORLD, quantization: str | None = None, *, by_expert: bool = True
) -> Model:
    whole = with_quantization(Settings(quantization=quantization), ModelConfig.load(folder))
    local = local_config(whole, rank, world, by_expert=by_expert)
    model = build_model(local, torch.device("cpu"), torch.float32, Ops.reference(), max_model_len=32)
    load_weights(model, folder, "auto", 0, lambda _: None)
    return model


def experts_of(model: Model) -> list[tuple[torch.Tensor, ...]]:
    """Of each layer that has them: what its products with experts multiply by, and their biases."""
    found = []
    for layer in as_decoder(model).layers:
        if isinstance(layer.mlp, MixtureOfExperts):
            held = layer.mlp._experts
            weights = [each if isinstance(each, torch.Tensor) else each.dense() for each in held[:2]]
            found.append((*weights, *(bias for bias in held[2:4] if bias is not None)))
    return found


def check_experts(folder: Path, quantization: str | None = None) -> None:
    """Those of all ranks behind each other are those of the whole."""
    whole = experts_of(loaded(folder, 0, 1, quantization))
    parts = [experts_of(loaded(folder, rank, WORLD, quantization)) for rank in range(WORLD)]
    assert whole
    for place, tensors in enumerate(whole):
        for kind, tensor in enumerate(tensors):
            own = [part[place][kind] for part in parts]
            assert all(0 < len(each) < len(tensor) for each in own)
            assert torch.equal(torch.cat(own), tensor)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss", "llama4", "granite-moe"])
def test_experts_put_together_are_the_whole(name: str, tmp_path: Path) -> None:
    """Each by itself, by both sorts of names; all in one tensor, inputs first, by turns, with biases."""
    check_experts(golden(name, tmp_path)[1])


@pytest.mark.parametrize(
    ("name", "width"), [("fp8-blocks", 48), ("gptq-4-act-order", 64), ("awq", 48), ("bnb-nf4-nested", 192)]
)
def test_quantized_experts_put_together_are_the_whole(name: str, width: int, tmp_path: Path) -> None:
    """Also with groups of scales, and an order of columns, that ranks cannot divide by the width."""
    packer = PACKERS[name]
    config = {**packer.config, "dynamic": {"-:.*self_attn.*": {}}} if "gptq" in name else packer.config

    def chosen(weight: str) -> object:
        return PRODUCTS.search(weight) and not ("gptq" in name and "self_attn" in weight)

    model = make_golden(tmp_path / "model", "qwen3_moe", {**FIELDS, "moe_intermediate_size": width})
    folder, _ = quantize(model, tmp_path, type(packer)(config, packer.pack), chosen)
    check_experts(folder)
    with pytest.raises(ModelError, match=r"(gate|down)_proj has"):
        loaded(folder, 0, by_expert=False)


def test_experts_in_one_quantized_tensor_put_together_are_the_whole(tmp_path: Path) -> None:
    check_experts(small_gpt_oss(tmp_path)[0])


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_experts_that_are_quantized_at_load(quantization: str, tmp_path: Path) -> None:
    check_experts(make_golden(tmp_path, "qwen3_moe", FIELDS), quantization)


def intervals(folder: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the rank reads of the weight file: first byte, end."""
    read: list[tuple[int, int]] = []
    real = weight_copy.read_into

    def read_into(file: int, into: memoryview, offset: int) -> None:
        read.append((offset, offset + len(into)))
        real(file, into, offset)

    with monkeypatch.context() as patched:
        patched.setattr(weight_copy, "read_into", read_into)
        loaded(folder, rank)
    return read


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "mxfp4", "awq"])
def test_a_rank_reads_the_bytes_of_its_own_experts_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte of experts is read by two ranks, none twice, and together they read all."""
    if name == "mxfp4":
        folder = small_gpt_oss(tmp_path)[0]
    elif name == "awq":
        folder = quantize(make_golden(tmp_path / "model", "qwen3_moe", FIELDS), tmp_path, PACKERS[name])[0]
    else:
        folder = golden(name, tmp_path)[1]
    [file] = folder.glob("*.safetensors")
    stored = read_headers([file])
    times = torch.zeros(file.stat().st_size, dtype=torch.int32)
    for rank in range(WORLD):
        for first, end in intervals(folder, rank, monkeypatch):
            times[first:end] += 1
    experts = [tensor for key, tensor in stored.items() if ".experts." in key and not key.endswith("_shape")]
    assert experts
    assert all(bool((times[each.offset : each.offset + each.num_bytes] == 1).all()) for each in experts)


def test_tensors_of_other_ranks_are_no_part_of_a_rank(tmp_path: Path) -> None:
    """One that is missing is named by the rank that needs it."""
    folder = golden("qwen3-moe", tmp_path)[1]
    stored = read_headers([folder / "model.safetensors"])
    names = set(load_file(folder / "model.safetensors"))
    missing = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert missing in names
    parts = []
    for rank in range(WORLD):
        local = local_config(ModelConfig.load(folder), rank, WORLD, by_expert=True)
        model = build_model(local, torch.device("meta"), torch.float32, Ops.reference(), max_model_len=32)
        parts.append(set(own_parts(stored, model)))
    shared = parts[0] & parts[1]
    assert parts[0] | parts[1] == names
    assert not any(".experts." in name for name in shared)
    assert missing in parts[1]
    assert missing not in parts[0]


def test_fewer_experts_than_ranks_are_refused(tmp_path: Path) -> None:
    fields = {"num_local_experts": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    whole = ModelConfig.load(make_golden(tmp_path, "mixtral", fields))
    with pytest.raises(ModelError, match=r"--tensor-parallel-size 8: --enable-expert.* only 4 experts"):
        local_config(whole, 0, 8, by_expert=True)
