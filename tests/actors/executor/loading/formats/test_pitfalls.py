"""What goes wrong in other loaders, one by one: numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.quantized.weights import empty_layout
from pagebus.actors.executor.loading.formats.finding import READERS
from pagebus.actors.executor.loading.formats.packed import awq_codes
from pagebus.actors.executor.loading.formats.storing import store
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.actors.settings import Settings
from pagebus.kernels.quantized.layouts import W4Words, W8Blocks
from tests.helpers.model_factory import make_golden, make_model
from tests.helpers.quantized.checkpoints import change, noise, quantize, tensors_of
from tests.helpers.quantized.layouts import CPU, layout_of, parsed, read
from tests.helpers.quantized.packers import (
    PACKERS,
    SIGNED,
    Packer,
    Tensors,
    awq,
    bit_rows,
    bnb_4bit,
    ct_packed,
    e4m3,
    fp8,
    gptq,
    gptq_zeros,
)

WIDE = {"hidden_size": 64, "intermediate_size": 128}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    model = build_model(ModelConfig.load(folder), CPU, dtype, Ops.reference(), max_model_len=32)
    load_weights(model, folder, "auto", 0, lambda _: None)
    return model


def test_weight_scale_inv_multiplies() -> None:
    """Whatever its name says."""
    scheme = parsed(fp8(16))
    tensors = {"weight": torch.full((16, 16), 2.0).to(torch.float8_e4m3fn), "weight_scale_inv": torch.tensor([[3.0]])}
    assert layout_of(scheme, tensors, 16, 16).dense().unique().tolist() == [6.0]


def test_a_scale_of_a_whole_tensor_may_have_the_name_of_those_of_blocks(tmp_path: Path) -> None:
    """transformers writes it so, and Ministral-3-8B-Instruct-2512 has it; so is what it calls input_scale."""
    model = make_model(tmp_path / "model", "llama3", seed=1, **WIDE)
    quantized, dense = quantize(model, tmp_path, fp8(static=True))
    change(quantized, _as_transformers_writes)
    weight = load(quantized).layers[0].mlp.down.weight
    assert not isinstance(weight, torch.Tensor)
    assert torch.equal(weight.dense(), tensors_of(dense)["model.layers.0.mlp.down_proj.weight"])


def _as_transformers_writes(tensors: Tensors) -> None:
    for name in list(tensors):
        new = name.replace("weight_scale", "weight_scale_inv").replace("input_scale", "activation_scale")
        tensors[new] = tensors.pop(name)


def test_nvfp4_global_scale_divides_in_compressed_tensors_and_multiplies_in_modelopt() -> None:
    """Code 7 is 6, its group's scale 2, the tensor's 4."""
    packed, small = torch.full((1, 8), 0x77, dtype=torch.uint8), torch.full((1, 1), 2.0).to(torch.float8_e4m3fn)
    divided = {"weight_packed": packed, "weight_scale": small, "weight_global_scale": torch.tensor([4.0])}
    multiplied = {"weight": packed, "weight_scale": small, "weight_scale_2": torch.tensor(4.0)}

    assert layout_of(parsed(PACKERS["ct-nvfp4"]), divided, 1, 16).dense().unique().tolist() == [3.0]
    assert layout_of(parsed(PACKERS["modelopt-nvfp4"]), multiplied, 1, 16).dense().unique().tolist() == [48.0]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_version_1_stores_one_less_and_wraps(bits: int) -> None:
    """Also a zero of 0, which borrows from the field beside it; version 2 stores what it means."""
    zeros = torch.arange(32).view(1, 32) % 2**bits
    codes = torch.zeros(32, 32, dtype=torch.int64)
    tensors = {"qweight": bit_rows(codes, bits).t(), "scales": torch.ones(1, 32)}
    for v2 in (False, True):
        scheme = parsed(gptq(bits, 32, sym=False, v2=v2))
        stored = {**tensors, "qzeros": gptq_zeros(zeros, bits, v2=v2)}
        assert layout_of(scheme, stored, 32, 32).dense()[:, 0].tolist() == (-zeros[0]).tolist()


@pytest.mark.parametrize("stored", [7, 8])
def test_a_symmetric_gptq_file_is_centred_whatever_its_version(stored: int) -> None:
    """vllm#38966: files whose stored zero is 8 are version 2 and do not always say so."""
    tensors = {
        "qweight": bit_rows(torch.full((8, 32), 9), 4).t(), "scales": torch.ones(1, 8),
        "qzeros": bit_rows(torch.full((1, 8), stored), 4),
    }  # fmt: skip
    assert layout_of(parsed(gptq(4, 32, sym=True)), tensors, 8, 32).dense().unique().tolist() == [1.0]


def test_awq_columns_are_interleaved() -> None:
    """Nibble i of a word is column 0, 2, 4, 6, 1, 3, 5, 7."""
    word = sum(code << (4 * place) for place, code in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    assert awq_codes(torch.tensor([[word]], dtype=torch.int32), 8).tolist() == [list(range(8))]


def test_awq_adds_nothing_to_its_zeros() -> None:
    """Unlike GPTQ."""
    tensors = {
        "qweight": torch.zeros(32, 1, dtype=torch.int32), "qzeros": bit_rows(torch.full((2, 8), 5), 4),
        "scales": torch.ones(2, 8),
    }  # fmt: skip
    assert layout_of(parsed(PACKERS["awq"]), tensors, 8, 32).dense().unique().tolist() == [-5.0]


def test_bitsandbytes_has_the_high_nibble_first() -> None:
    """Unlike all others."""
    packer = bnb_4bit("nf4", nested=False)
    tensors, _ = packer.pack(noise(1, 64))
    tensors["weight"] = torch.full((32, 1), 0x0F, dtype=torch.uint8)
    tensors["weight.absmax"] = torch.tensor([2.0])
    assert layout_of(parsed(packer), tensors, 1, 64).dense()[0, :4].tolist() == [-2.0, 2.0, -2.0, 2.0]


def test_blocks_of_bitsandbytes_that_cross_rows_are_refused(tmp_path: Path) -> None:
    """64 divides the rows of all real models."""
    model = make_model(tmp_path / "model", "llama3", seed=1, **{**WIDE, "intermediate_size": 96})
    quantized, _ = quantize(model, tmp_path, PACKERS["bnb-nf4"])
    with pytest.raises(ModelError, match=r"down_proj has blocks of 64 numbers and rows of 96: .* \(bnb_4bit, nf4"):
        load(quantized)


def test_block_scales_of_fused_parts_are_cut_after_they_are_spread() -> None:
    """vllm#53242: parts of 24 rows begin within blocks of 16."""
    scheme = Scheme("fp8", "e4m3", 8, (16, 16))
    layout = empty_layout(scheme, (24, 24), 32, CPU)
    assert isinstance(layout, W8Blocks)
    assert layout.block == (1, 16)
    expected = []
    for place, seed in enumerate((1, 2)):
        tensors, dense = fp8(16).pack(noise(24, 32, seed))
        store(layout.part(None, 24 * place, 24 * place + 24), READERS["fp8"].read(tensors, scheme, 24, 32), scheme)
        expected.append(dense)
    assert torch.equal(layout.dense(), torch.cat(expected))
    even = empty_layout(scheme, (32, 16), 32, CPU)
    assert isinstance(even, W8Blocks)
    assert even.block == (16, 16)


def test_fused_parts_keep_their_own_tensor_scales(tmp_path: Path) -> None:
    """Three scales for q, k and v stay three: nothing is rounded to the largest."""
    model = make_model(tmp_path / "model", "llama3", seed=1, **WIDE)
    change(model, lambda tensors: tensors["model.layers.0.self_attn.k_proj.weight"].mul_(100))
    quantized, dense = quantize(model, tmp_path, PACKERS["fp8"])
    weight, stored = load(quantized).layers[0].attention.qkv.weight, tensors_of(dense)
    assert not isinstance(weight, torch.Tensor)
    assert torch.equal(weight.dense(), torch.cat([stored[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]))


def test_a_fused_checkpoint_has_one_scale_for_its_parts(tmp_path: Path) -> None:
    """vllm#5915: Phi-3's qkv_proj is one module."""
    fields = {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
    quantized, dense = quantize(make_golden(tmp_path / "model", "phi3", fields), tmp_path, PACKERS["fp8"])
    weight = load(quantized).layers[0].attention.qkv.weight
    assert not isinstance(weight, torch.Tensor)
    assert torch.equal(weight.dense(), tensors_of(dense)["model.layers.0.self_attn.qkv_proj.weight"])


@pytest.mark.parametrize("name", ["fp8", "fp8-blocks", "gptq-4-zeros", "ct-nvfp4"])
def test_heads_that_turn_by_neighbours_are_reordered_in_every_layout(name: str, tmp_path: Path) -> None:
    """Rows with their scales: what the layouts mean is reordered as the dense weight is."""
    fields = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32,
              "pad_token_id": 0}  # fmt: skip
    quantized, dense = quantize(make_golden(tmp_path / "model", "glm", fields), tmp_path, PACKERS[name])
    ours, meant = (load(folder).layers[1].attention.qkv.weight for folder in (quantized, dense))
    assert not isinstance(ours, torch.Tensor)
    assert isinstance(meant, torch.Tensor)
    torch.testing.assert_close(ours.dense(), meant, rtol=1e-6, atol=0)


def test_a_tied_head_is_not_read_a_second_time(tmp_path: Path) -> None:
    """Whatever the file has of it, quantized or not."""
    model = make_model(tmp_path / "model", "llama3", seed=1, tie_word_embeddings=True, **WIDE)
    quantized, _ = quantize(model, tmp_path, PACKERS["gptq-4"])
    change(quantized, lambda tensors: tensors.update({"lm_head.qweight": torch.zeros(4, 4, dtype=torch.int32)}))
    loaded = load(quantized)
    assert loaded.head.weight is loaded.embedding.weight


def test_a_quantized_head_becomes_dense(tmp_path: Path) -> None:
    """GPTQ's ``lm_head``: it is read in its format."""
    model = make_model(tmp_path / "model", "llama3", seed=1, vocab_size=320, **WIDE)
    quantized, dense = quantize(model, tmp_path, PACKERS["gptq-4-zeros"], lambda name: "proj" in name or "head" in name)
    torch.testing.assert_close(load(quantized).head.weight, tensors_of(dense)["lm_head.weight"])


def test_parts_of_a_product_need_one_order_of_columns(tmp_path: Path) -> None:
    """Act-order: q, k and v read the same inputs, gathered once."""
    model = make_model(tmp_path / "model", "llama3", seed=1, **WIDE)
    quantized, _ = quantize(model, tmp_path, PACKERS["gptq-4-act-order"])
    change(quantized, lambda tensors: tensors["model.layers.0.self_attn.k_proj.g_idx"].copy_(torch.arange(64) // 16))
    with pytest.raises(ModelError, match=r"[kq]_proj has its columns in another order .* act-order\)"):
        load(quantized)


@pytest.mark.parametrize(
    ("packer", "name", "field"),
    [(PACKERS["gptq-4-zeros"], "g_idx", "desc_act"), (ct_packed(4, 16, sym=True), "weight_g_idx", "actorder")],
    ids=["gptq", "compressed-tensors"],
)
def test_act_order_that_is_not_announced_is_refused(packer: Packer, name: str, field: str, tmp_path: Path) -> None:
    """A file whose g_idx is no ramp, without the field that says so."""
    model = make_model(tmp_path / "model", "llama3", seed=1, **WIDE)
    quantized, _ = quantize(model, tmp_path, packer)
    order = {f"model.layers.0.mlp.up_proj.{name}": (torch.arange(64) % 4).int()}
    change(quantized, lambda tensors: tensors.update(order))
    with pytest.raises(ModelError, match=rf"up_proj has columns in an order of their own \({name}\), .* no {field}"):
        load(quantized)


def test_gptq_biases_of_zeros_are_no_others_than_none(tmp_path: Path) -> None:
    """AutoGPTQ wrote them for every product (Qwen2-7B-Instruct-GPTQ-Int8, TheBloke's); Qwen 2 has its own of some."""
    model = make_model(tmp_path / "model", "qwen2", seed=1, **WIDE)
    quantized, dense = quantize(model, tmp_path, gptq(4, 32, sym=True))
    down = "model.layers.0.mlp.down_proj.bias"
    change(quantized, lambda tensors: tensors.update({down: torch.zeros(64)}))
    bias, stored = load(quantized).layers[0].attention.qkv.bias, tensors_of(dense)
    assert bias is not None
    assert torch.equal(bias, torch.cat([stored[f"model.layers.0.self_attn.{part}_proj.bias"] for part in "qkv"]))
    change(quantized, lambda tensors: tensors.update({down: torch.ones(64)}))
    with pytest.raises(ModelError, match=r"down_proj has a bias that is not 0, and config\.json asks for none \(gptq"):
        load(quantized)


MIXTRAL = [f"block_sparse_moe.experts.{expert}" for expert in range(3)]


@pytest.mark.parametrize(
    ("packer", "lists"),
    [
        (
            gptq(4, 32, sym=True),
            {"modules_in_block_to_quantize": [
                [f"self_attn.{part}_proj" for part in "kvq"], ["self_attn.o_proj"],
                [f"{expert}.{name}" for expert in MIXTRAL for name in ("w1", "w3")], [f"{each}.w2" for each in MIXTRAL],
            ]},
        ),
        (awq(32), {"modules_to_not_convert": ["gate"]}),
    ],
    ids=["gptq", "awq"],
)  # fmt: skip
def test_lists_mean_experts_by_the_names_that_their_family_has(
    packer: Packer, lists: dict[str, Any], tmp_path: Path
) -> None:
    """TheBloke's GPTQ of Mixtral names w1, w2 and w3; AWQ's "gate" is its router, and no gate_proj."""
    fields = {**WIDE, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 3}
    model = make_golden(tmp_path / "model", "mixtral", fields)
    quantized, dense = quantize(model, tmp_path, Packer({**packer.config, **lists}, packer.pack))
    weight = load(quantized).layers[0].mlp.expert_weights["experts_down"]
    stored = tensors_of(dense)
    assert not isinstance(weight, torch.Tensor)
    assert torch.equal(
        weight.dense(), torch.stack([stored[f"model.layers.0.{expert}.w2.weight"] for expert in MIXTRAL])
    )


def test_exponents_of_two_are_exact_at_both_ends() -> None:
    """E8M0 0 is 2 ** -127, 254 is 2 ** 127; both times 0.5 ... 6 of every code, bit for bit."""
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for code, power in ((0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (252, 2.0**125)):
        tensors = {"blocks": packed.view(16, 1, 16), "scales": torch.full((16, 1), code, dtype=torch.uint8)}
        dense = layout_of(Scheme("mxfp4", "e2m1", 4, (1, 32), scales="e8m0"), tensors, 16, 32).dense()
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        assert torch.equal(dense, torch.tensor(SIGNED)[codes] * power)


def test_an_exponent_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """E8M0 255; and other scales that are infinite or no numbers."""
    model = make_model(tmp_path / "model", "llama3", seed=1, **WIDE)
    quantized, _ = quantize(model, tmp_path, PACKERS["ct-mxfp4"])
    change(quantized, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight_scale"].fill_(255))
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.up_proj has scales that are no finite numbers, or above 1e\+30 \(ct_mxfp4"
    ):
        load(quantized)


def test_weights_of_odd_widths_are_padded_in_their_words() -> None:
    """K = 2880 of gpt-oss is no multiple of 128: the tile's rest is never seen."""
    layout, dense = read(PACKERS["ct-mxfp4"], noise(4, 2880))
    assert isinstance(layout, W4Words)
    assert layout.words.shape == (4, 23 * 16)
    assert torch.equal(layout.dense(), dense)


def test_experts_quantized_at_load_pass_the_quantizer_too(tmp_path: Path) -> None:
    """tokenspeed#1097: stacked experts that were only cast."""
    fields = {**WIDE, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = make_golden(tmp_path / "model", "qwen3_moe", fields)
    stored = tensors_of(folder)
    names = [f"model.layers.0.mlp.experts.{index}.down_proj.weight" for index in range(3)]
    expected = torch.stack([stored[name] for name in names])
    change(folder, lambda tensors: [tensors.pop(name) for name in names])
    change(folder, lambda tensors: tensors.update({"model.layers.0.mlp.experts.down_proj": expected}))
    experts = online(folder, "fp8").layers[0].mlp._experts  # type: ignore[union-attr]
    scale = expected.abs().amax(-1, keepdim=True) / 448
    meant = e4m3(expected, scale).float() * scale
    assert torch.equal(experts.down.dense(), meant)


def online(folder: Path, method: str) -> Model:
    config = with_quantization(Settings(quantization=method), ModelConfig.load(folder))
    model = build_model(config, CPU, torch.float32, Ops.reference(), max_model_len=32)
    load_weights(model, folder, "auto", 0, lambda _: None)
    return model


@pytest.mark.parametrize(("method", "most"), [("fp8", 0.07), ("int8", 0.01), ("int4", 0.2)])
def test_weights_made_at_load_are_near(method: str, most: float, tmp_path: Path) -> None:
    """Each number within the rounding of its row or group; the head stays as it is."""
    folder = make_model(tmp_path / "model", "llama3", seed=1, **WIDE)
    model, stored = online(folder, method), tensors_of(folder)
    weight = model.layers[1].mlp.down.weight  # type: ignore[union-attr]
    assert not isinstance(weight, torch.Tensor)
    meant = stored["model.layers.1.mlp.down_proj.weight"]
    error = (weight.dense() - meant).abs().max() / meant.abs().max()
    assert 0 < error < most
    assert torch.equal(model.head.weight, stored["lm_head.weight"])
