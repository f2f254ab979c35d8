"""Packers of quantized formats, written from their descriptions: number by number, sharing nothing with the readers.

Each takes a weight [N, K] and gives the tensors of its module, and the weight that these mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.091050036, 0.0, 0.0795803, 0.1609302,
    0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0,
)  # fmt: skip
FP4 = (0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)


@dataclass(frozen=True)
class Packer:
    """``config`` is the checkpoint's ``quantization_config``."""

    config: Mapping[str, Any]
    pack: Callable[[torch.Tensor], Packed]


def stream(codes: Sequence[int], bits: int) -> list[int]:
    """Numbers one after another in words of 32 bits, the first lowest."""
    number = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    size = -(-len(codes) * bits // 32) * 4
    return np.frombuffer(number.to_bytes(size, "little"), np.int32).tolist()


def bit_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes [A, B] -> int32 [A, words of B]."""
    return torch.tensor([stream(row, bits) for row in codes.tolist()], dtype=torch.int32)


def grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """[N, G, group]"""
    return weight.view(len(weight), -1, group)


def integers(
    weight: torch.Tensor, bits: int, group: int, *, zeros: bool, scale_dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales [N, G], zeros [N, G], and the weight."""
    parts, top = grouped(weight, group), 2**bits - 1
    if zeros:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = ((high - low) / top).to(scale_dtype).float()
        zero = (-low / scale).round().clamp(0, top)
    else:
        scale = (parts.abs().amax(-1) / (top // 2)).to(scale_dtype).float()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    codes = (parts / scale[..., None] + zero[..., None]).round().clamp(0, top)
    dense = (codes - zero[..., None]) * scale[..., None]
    return codes.flatten(1).to(torch.int64), scale.to(scale_dtype), zero.to(torch.int64), dense.flatten(1)


def gptq_zeros(zeros: torch.Tensor, bits: int, *, v2: bool) -> torch.Tensor:
    """As GPTQModel stores them: version 1 takes ones from all fields of a word at once, of 3 bits from each."""
    if v2:
        return bit_rows(zeros, bits)
    if bits == 3:
        return bit_rows((zeros - 1) % 8, 3)
    ones = int("1".zfill(bits) * (32 // bits), 2)
    return torch.from_numpy((bit_rows(zeros, bits).numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))


def gptq(bits: int, group: int, *, sym: bool, act_order: bool = False, v2: bool = False) -> Packer:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order,
              "checkpoint_format": "gptq_v2" if v2 else "gptq"}  # fmt: skip

    def pack(weight: torch.Tensor) -> Packed:
        columns = weight.shape[1]
        width = columns if group == -1 else group
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if act_order else None
        shuffled = weight if order is None else weight[:, order]
        codes, scale, zero, dense = integers(shuffled, bits, width, zeros=not sym)
        groups = torch.arange(columns) // width
        if order is not None:
            back = torch.argsort(order)
            codes, dense, groups = codes[:, back], dense[:, back], groups[back]
        tensors = {
            "qweight": bit_rows(codes, bits).t().contiguous(),
            "qzeros": gptq_zeros(zero.t(), bits, v2=v2),
            "scales": scale.t().contiguous(),
            "g_idx": groups.to(torch.int32),
        }
        return tensors, dense

    return Packer(config, pack)


def awq(group: int) -> Packer:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}

    def interleaved(codes: torch.Tensor) -> torch.Tensor:
        """[A, N] -> int32 [A, N / 8]."""
        words = codes.view(len(codes), -1, 8)[..., list(AWQ_COLUMNS)]
        return bit_rows(words.flatten(1), 4)

    def pack(weight: torch.Tensor) -> Packed:
        codes, scale, zero, dense = integers(weight, 4, group, zeros=True)
        tensors = {"qweight": interleaved(codes.t()), "qzeros": interleaved(zero.t()), "scales": scale.t().contiguous()}
        return tensors, dense

    return Packer(config, pack)


def compressed(form: str, weights: Mapping[str, Any], pack: Callable[[torch.Tensor], Packed], **more: Any) -> Packer:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}, **more}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
              "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]}  # fmt: skip
    return Packer(config, pack)


def ct_packed(bits: int, group: int, *, sym: bool) -> Packer:
    def pack(weight: torch.Tensor) -> Packed:
        codes, scale, zero, dense = integers(weight, bits, group, zeros=not sym, scale_dtype=torch.bfloat16)
        tensors = {
            "weight_packed": bit_rows(codes, bits), "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not sym:
            tensors["weight_zero_point"] = bit_rows(zero.t(), bits).t().contiguous()
        return tensors, dense

    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": sym}
    return compressed("pack-quantized", weights, pack)


def int8_rows(weight: torch.Tensor, *, scale_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).to(scale_dtype)
    return (weight / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


def ct_int8() -> Packer:
    def pack(weight: torch.Tensor) -> Packed:
        values, scale = int8_rows(weight, scale_dtype=torch.bfloat16)
        return {"weight": values, "weight_scale": scale}, values.float() * scale.float()

    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    return compressed("int-quantized", weights, pack, input_activations=inputs)


def e4m3(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def ct_fp8() -> Packer:
    def pack(weight: torch.Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / 448
        values = e4m3(weight, scale)
        return {"weight": values, "weight_scale": scale}, values.float() * scale

    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    return compressed("float-quantized", weights, pack)


def fp8(block: int = 0, *, static: bool = False) -> Packer:
    """Of the whole tensor, or of blocks: the last ones may be partial."""
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    if block:
        config["weight_block_size"] = [block, block]

    def pack(weight: torch.Tensor) -> Packed:
        if not block:
            scale = weight.abs().amax() / 448
            tensors = {"weight": e4m3(weight, scale), "weight_scale": scale}
            if static:
                tensors["input_scale"] = torch.tensor(0.5)
            return tensors, tensors["weight"].float() * scale
        rows, columns = weight.shape
        scale = torch.empty(-(-rows // block), -(-columns // block))
        values, dense = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                place = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                scale[i, j] = weight[place].abs().amax() / 448
                values[place] = e4m3(weight[place], scale[i, j])
                dense[place] = values[place].float() * scale[i, j]
        return {"weight": values, "weight_scale_inv": scale}, dense

    return Packer(config, pack)


def fbgemm() -> Packer:
    return Packer({"quant_method": "fbgemm_fp8"}, ct_fp8().pack)


def modelopt_fp8() -> Packer:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*.gate"]}
    return Packer(config, fp8(static=True).pack)


def nearest(values: torch.Tensor, table: Sequence[float]) -> torch.Tensor:
    """The index of the entry that is nearest."""
    return (values.unsqueeze(-1) - torch.tensor(table)).abs().argmin(-1)


def fours(codes: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """codes [N, K] -> uint8 [N, K / 2]."""
    first, second = codes[:, 0::2], codes[:, 1::2]
    return (first * 16 + second if high_first else second * 16 + first).to(torch.uint8)


SIGNED = (*E2M1, *(-each for each in E2M1))


def nvfp4(*, modelopt: bool) -> Packer:
    def pack(weight: torch.Tensor) -> Packed:
        parts = grouped(weight, 16)
        whole = weight.abs().amax() / (6 * 448)
        small = (parts.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        codes = nearest(parts / (small.float() * whole)[..., None], SIGNED)
        dense = torch.tensor(SIGNED)[codes] * (small.float() * whole)[..., None]
        packed = fours(codes.flatten(1))
        if modelopt:
            tensors = {"weight": packed, "weight_scale": small, "weight_scale_2": whole,
                       "input_scale": torch.tensor(1.0)}  # fmt: skip
            return tensors, dense.flatten(1)
        divisor = 1 / whole
        dense = torch.tensor(SIGNED)[codes] * (small.float() / divisor)[..., None]
        tensors = {"weight_packed": packed, "weight_scale": small, "weight_global_scale": divisor.view(1)}
        return tensors, dense.flatten(1)

    if modelopt:
        return Packer(
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}, pack
        )
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return compressed("nvfp4-pack-quantized", weights, pack)


def mx_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, G, 32], exponents [N, G], and the weight."""
    parts = grouped(weight, 32)
    exponent = (parts.abs().amax(-1) / 4).log2().ceil().clamp(-126, 127)
    codes = nearest(parts / exponent.exp2()[..., None], SIGNED)
    dense = torch.tensor(SIGNED)[codes] * exponent.exp2()[..., None]
    return codes, (exponent + 127).to(torch.uint8), dense.flatten(1)


def ct_mxfp4() -> Packer:
    def pack(weight: torch.Tensor) -> Packed:
        codes, exponent, dense = mx_codes(weight)
        return {"weight_packed": fours(codes.flatten(1)), "weight_scale": exponent}, dense

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return compressed("mxfp4-pack-quantized", weights, pack)


def bnb_4bit(kind: str, *, nested: bool) -> Packer:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
              "bnb_4bit_use_double_quant": nested, "llm_int8_skip_modules": ["lm_head"]}  # fmt: skip
    table = NF4 if kind == "nf4" else (*FP4, *(-each for each in FP4))

    def pack(weight: torch.Tensor) -> Packed:
        blocks = weight.reshape(-1, 64)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        tensors = {}
        if nested:
            absmax, tensors, more = _nested(absmax)
            state |= more
        codes = nearest(blocks / absmax[:, None], table)
        tensors |= {
            "weight": fours(codes.view(1, -1), high_first=True).view(-1, 1),
            "weight.quant_map": torch.tensor(table),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        tensors.setdefault("weight.absmax", absmax)
        return tensors, (torch.tensor(table)[codes] * absmax[:, None]).view(weight.shape)

    return Packer(config, pack)


def _nested(absmax: torch.Tensor) -> tuple[torch.Tensor, Tensors, dict[str, Any]]:
    """Scales of one byte: what they mean, their tensors, and what the state says of them."""
    offset = float(absmax.mean())
    table = torch.linspace(-1, 1, 256)
    parts = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
    largest = parts.abs().amax(1)
    codes = nearest(parts / largest[:, None], table.tolist())
    meant = (table[codes] * largest[:, None]).flatten()[: len(absmax)] + offset
    tensors = {
        "weight.absmax": codes.flatten()[: len(absmax)].to(torch.uint8), "weight.nested_absmax": largest,
        "weight.nested_quant_map": table,
    }  # fmt: skip
    return meant, tensors, {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}


def bnb_int8() -> Packer:
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}

    def pack(weight: torch.Tensor) -> Packed:
        largest = weight.abs().amax(1)
        values = (weight * 127 / largest[:, None]).round().to(torch.int8)
        tensors = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, values.float() * largest[:, None] / 127

    return Packer(config, pack)


def torchao(kind: str) -> Packer:
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}}

    def pack(weight: torch.Tensor) -> Packed:
        tensors, dense = ct_fp8().pack(weight) if "Float8" in kind else (None, None)
        if tensors is None or dense is None:
            values, scale = int8_rows(weight)
            tensors, dense = {"weight": values, "weight_scale": scale}, values.float() * scale
        return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"]}, dense

    return Packer(config, pack)


def torchao_of(kind: str, granularity: dict[str, object], block: tuple[int, int], *, zeros: bool = False) -> Packer:
    """8 bits with scales of groups or blocks. ``granularity``: as the library writes it."""
    key = "weight_granularity" if "Dynamic" in kind else "granularity"
    given: object = [granularity, granularity] if "Float8Dynamic" in kind else granularity
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {
        "granularity" if "Float8" in kind else key: given}}}}  # fmt: skip
    largest = 448.0 if "Float8" in kind else 127.0

    def pack(weight: torch.Tensor) -> Packed:
        rows, columns = block
        tiles = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = tiles.abs().amax((1, 3)) / largest
        spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        zero = torch.arange(scale.numel()).view(scale.shape) % 7 - 3 if zeros else torch.zeros_like(scale)
        values = weight / spread
        whole = values.round().clamp(-120, 120).to(torch.int8)
        values = values.to(torch.float8_e4m3fn) if "Float8" in kind else whole
        off = zero.repeat_interleave(rows, 0).repeat_interleave(columns, 1).float()
        tensors = {"_weight_qdata": values, "_weight_scale": scale}
        if zeros:
            tensors["_weight_zero_point"] = zero.to(torch.int8)
        return tensors, (values.float() - off) * spread

    return Packer(config, pack)


def torchao_int4(group: int) -> Packer:
    """Signed numbers in halves of bytes, and zero points that are added."""
    data = {"group_size": group, "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"}}
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": data}}}

    def pack(weight: torch.Tensor) -> Packed:
        groups = weight.unflatten(1, (-1, group))
        least, most = groups.amin(2), groups.amax(2)
        scale = (most - least) / 15
        middle = least + 8 * scale
        numbers = ((groups - least.unsqueeze(2)) / scale.unsqueeze(2)).round().clamp(0, 15) - 8
        flat = numbers.flatten(1).to(torch.int8)
        packed = (flat[:, ::2] & 15) | (flat[:, 1::2] << 4)
        tensors = {"_weight_qdata": packed, "_weight_scale": scale.t(), "_weight_zero_point": middle.t()}
        return tensors, (numbers * scale.unsqueeze(2) + middle.unsqueeze(2)).flatten(1)

    return Packer(config, pack)


GROUP = {"_type": "PerGroup", "_data": {"group_size": 16}}
BLOCK = {"_type": "PerBlock", "_data": {"block_size": [16, 16]}}
PACKERS: Mapping[str, Packer] = {
    "fp8": fp8(), "fp8-static": fp8(static=True), "fp8-blocks": fp8(16), "fp8-blocks-partial": fp8(48),
    "fbgemm": fbgemm(), "modelopt-fp8": modelopt_fp8(), "modelopt-nvfp4": nvfp4(modelopt=True),
    "ct-int4": ct_packed(4, 16, sym=True), "ct-int4-zeros": ct_packed(4, 16, sym=False),
    "ct-int3": ct_packed(3, 32, sym=False), "ct-int6": ct_packed(6, 16, sym=False), "ct-int8": ct_int8(),
    "ct-int8-packed": ct_packed(8, 16, sym=True), "ct-fp8": ct_fp8(), "ct-nvfp4": nvfp4(modelopt=False),
    "ct-mxfp4": ct_mxfp4(),
    "gptq-2": gptq(2, 16, sym=False), "gptq-3": gptq(3, 32, sym=False), "gptq-4": gptq(4, 32, sym=True),
    "gptq-4-zeros": gptq(4, 16, sym=False), "gptq-4-v2": gptq(4, 16, sym=False, v2=True),
    "gptq-4-rows": gptq(4, -1, sym=True), "gptq-8": gptq(8, 16, sym=True), "gptq-8-zeros": gptq(8, 16, sym=False),
    "gptq-4-act-order": gptq(4, 16, sym=False, act_order=True),
    "gptq-8-act-order": gptq(8, 16, sym=True, act_order=True),
    "awq": awq(16),
    "bnb-nf4": bnb_4bit("nf4", nested=False), "bnb-nf4-nested": bnb_4bit("nf4", nested=True),
    "bnb-fp4": bnb_4bit("fp4", nested=True), "bnb-int8": bnb_int8(),
    "torchao-int8": torchao("Int8WeightOnlyConfig"), "torchao-fp8": torchao("Float8WeightOnlyConfig"),
    "torchao-int4": torchao_int4(32), "torchao-int8-groups": torchao_of("Int8WeightOnlyConfig", GROUP, (1, 16)),
    "torchao-intx": torchao_of("Int8DynamicActivationIntxWeightConfig", GROUP, (1, 16), zeros=True),
    "torchao-fp8-blocks": torchao_of("Float8DynamicActivationFloat8WeightConfig", BLOCK, (16, 16)),
}  # fmt: skip
