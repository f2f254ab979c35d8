"""Bytes that the formats' own libraries packed mean here what these libraries say (``make_goldens.py``)."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from pagebus.actors.model.quantization.scheme import Scheme
from tests.helpers.quantized.layouts import layout_of, parsed
from tests.helpers.quantized.make_goldens import FILE
from tests.helpers.quantized.packers import PACKERS, Packer, bnb_4bit, bnb_int8, ct_mxfp4, ct_packed, gptq, torchao

GOLDENS: dict[str, dict[str, torch.Tensor]] = {}
for name, tensor in load_file(FILE).items():
    case, part = name.split("/")
    GOLDENS.setdefault(case, {})[part] = tensor
CONFIGS: dict[str, Packer] = {
    "ct-int3": ct_packed(3, 32, sym=True), "ct-int4": ct_packed(4, 32, sym=True),
    "ct-int4-zeros": ct_packed(4, 32, sym=False), "ct-int6-zeros": ct_packed(6, 32, sym=False),
    "ct-int8": ct_packed(8, 32, sym=True), "ct-nvfp4": PACKERS["ct-nvfp4"], "ct-mxfp4": ct_mxfp4(),
    "bnb-nf4": bnb_4bit("nf4", nested=False), "bnb-nf4-nested": bnb_4bit("nf4", nested=True),
    "bnb-fp4": bnb_4bit("fp4", nested=False), "bnb-fp4-nested": bnb_4bit("fp4", nested=True), "bnb-int8": bnb_int8(),
    "torchao-int8": torchao("Int8WeightOnlyConfig"), "torchao-fp8": torchao("Float8WeightOnlyConfig"),
    "mxfp4": ct_mxfp4(),
    "awq": Packer({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, PACKERS["awq"].pack),
    **{f"gptq-{bits}-v2": gptq(bits, 32, sym=False, v2=True, act_order=bits == 4) for bits in (2, 3, 4, 8)},
    **{f"gptq-{bits}": gptq(bits, 32, sym=False, act_order=bits == 4) for bits in (2, 4, 8)},
}  # fmt: skip
MXFP4 = Scheme("mxfp4", "e2m1", 4, (1, 32), scales="e8m0")
ROUNDED = {"bnb-int8": 2e-3, "ct-nvfp4": 8e-3}
"""These libraries answer in float16 and in bfloat16 alone, the latter after two roundings."""


@pytest.mark.parametrize("case", GOLDENS)
def test_a_library_s_bytes_are_read_as_it_reads_them(case: str) -> None:
    """Up to one rounding."""
    dense = GOLDENS[case]["dense"]
    tensors = {name: tensor for name, tensor in GOLDENS[case].items() if name != "dense"}

    scheme = MXFP4 if case == "mxfp4" else parsed(CONFIGS[case])
    got = layout_of(scheme, tensors, *dense.shape).dense()

    torch.testing.assert_close(got, dense, rtol=ROUNDED.get(case, 3e-7), atol=0.0)
    assert len(dense.unique()) > 12


def test_every_golden_is_read() -> None:
    """And every configuration has one."""
    assert set(GOLDENS) == set(CONFIGS)
