"""Makes ``goldens.safetensors``: small weights packed by the formats' own libraries, and what these say they mean.

The libraries are no dependencies of the tests. In an environment with compressed-tensors 0.20, bitsandbytes 0.50 and
torchao 0.18, and the unpacked sources of AutoAWQ 0.2.9 and GPTQModel 7.7, of which only the packing functions are run:
``python -m tests.helpers.quantized.make_goldens AUTOAWQ GPTQMODEL``.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.helpers.quantized.packers import Tensors, integers

FILE = Path(__file__).with_name("goldens.safetensors")
ROWS, COLUMNS = 32, 64


def weight(seed: int) -> torch.Tensor:
    """bfloat16 numbers, so that every library has them exactly."""
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def compressed_tensors() -> dict[str, Tensors]:
    """What its compressors write, and what they read back."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def case(compressor: Any, state: Tensors, **args: Any) -> Tensors:
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        packed = compressor.compress(state, scheme)
        dense = compressor.decompress({**packed, "weight_scale": packed["weight_scale"].clone()}, scheme)["weight"]
        return {**packed, "dense": dense.float()}

    found = {}
    for bits, symmetric in ((3, True), (4, True), (4, False), (6, False), (8, True)):
        w = weight(bits)
        _, scale, zero, _ = integers(w, bits, 32, zeros=not symmetric, scale_dtype=torch.float32)
        state = {"weight": w, "weight_scale": scale}
        if not symmetric:
            state["weight_zero_point"] = (zero - 2 ** (bits - 1)).to(torch.int8)
        args = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric}
        found[f"ct-int{bits}{'' if symmetric else '-zeros'}"] = case(PackedQuantizationCompressor, state, **args)
    w = weight(1)
    whole = 448 * 6 / w.abs().amax().view(1)
    scale = (w.view(ROWS, -1, 16).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn).float()
    state = {"weight": w, "weight_scale": scale, "weight_global_scale": whole}
    found["ct-nvfp4"] = case(
        NVFP4PackedCompressor, state, num_bits=4, type="float", strategy="tensor_group", group_size=16
    )
    scale = (w.view(ROWS, -1, 32).abs().amax(-1) / 4).log2().ceil().exp2()
    found["ct-mxfp4"] = case(
        MXFP4PackedCompressor,
        {"weight": w, "weight_scale": scale},
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
    )
    return found


def bitsandbytes() -> dict[str, Tensors]:
    """4 bits, with scales that are quantized themselves, and int8 rows."""
    from bitsandbytes import functional

    found = {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            packed, state = functional.quantize_4bit(
                weight(5), blocksize=64, quant_type=kind, compress_statistics=nested
            )
            dense = functional.dequantize_4bit(packed, state)
            tensors = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
            found[f"bnb-{kind}{'-nested' if nested else ''}"] = {"weight": packed, **tensors, "dense": dense}
    values, scale, _ = functional.int8_vectorwise_quant(weight(6).half())
    dense = functional.int8_vectorwise_dequant(values, scale)
    found["bnb-int8"] = {"weight": values, "SCB": scale, "dense": dense.float()}
    return found


def gpt_oss() -> dict[str, Tensors]:
    """transformers' reading of all bytes and exponents that occur."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(256, (1, ROWS, COLUMNS // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 136, (1, ROWS, COLUMNS // 32), dtype=torch.uint8, generator=generator)
    dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, K, N]
    return {"mxfp4": {"blocks": blocks[0], "scales": scales[0], "dense": dense[0].t().contiguous()}}


def torchao() -> dict[str, Tensors]:
    """Rows of int8 and of float8, as they are flattened for files."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    found = {}
    for name, config in (("torchao-int8", Int8WeightOnlyConfig(version=2)), ("torchao-fp8", Float8WeightOnlyConfig())):
        layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        layer.weight.data = weight(8)
        module = torch.nn.ModuleDict({"m": layer})
        quantize_(module, config)
        tensors, _ = flatten_tensor_state_dict(module.state_dict())
        dense = module["m"].weight.dequantize().float()
        found[name] = {key.removeprefix("m."): tensor for key, tensor in tensors.items()} | {"dense": dense}
    return found


def function(file: Path, name: str, before: str = "") -> Any:
    """One function of a file, in a module of its own: its library wants a GPU's compiler to be imported."""
    text = file.read_text()
    node = next(each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef) and each.name == name)
    lines = textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "alone.py"
        alone.write_text(f"import math\nimport numpy as np\nimport torch\nimport torch as t\n{before}\n{lines}\n")
        spec = importlib.util.spec_from_file_location("alone", alone)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(module, name)


class Buffers(SimpleNamespace):
    """What a packing function fills."""

    def register_buffer(self, name: str, tensor: torch.Tensor) -> None:
        setattr(self, name, tensor)


def autoawq(source: Path) -> dict[str, Tensors]:
    """Its layer's words; the weight is that of their numbers."""
    pack = function(source / "awq/modules/linear/gemm.py", "from_linear", "get_best_device = lambda: 'cpu'")
    w = weight(9)
    _, scale, zero, dense = integers(w, 4, 32, zeros=True)
    layer = SimpleNamespace(
        weight=SimpleNamespace(data=dense, device="cpu"), bias=None, in_features=COLUMNS, out_features=ROWS
    )
    made = pack(
        lambda *_: SimpleNamespace(w_bit=4, in_features=COLUMNS), layer, 4, 32, scales=scale.t().contiguous(),
        zeros=zero.t().contiguous(),
    )  # fmt: skip
    return {"awq": {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales, "dense": dense}}


def gptqmodel(source: Path) -> dict[str, Tensors]:
    """Version 2 as it packs, and version 1 as it saves: ones taken from whole words."""
    before = (
        "import transformers\nfrom contextlib import nullcontext\nfrom types import SimpleNamespace\n"
        "from torch import nn\nfrom torch.nn.modules.conv import _ConvNd\n"
        "THREADPOOLCTL = SimpleNamespace(threadpool_limits=nullcontext)"
    )
    pack = function(source / "gptqmodel/nn_modules/qlinear/__init__.py", "pack_original", before)
    found = {}
    for bits in (2, 3, 4, 8):
        _, scale, zero, dense = integers(weight(bits), bits, 32, zeros=True)
        groups = torch.arange(COLUMNS) // 32
        if bits == 4:
            order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
            dense, groups = dense[:, order], groups[order]
        layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        layer.weight.data = dense
        made = Buffers(
            bits=bits, maxq=2**bits - 1, pack_np_math_dtype=np.uint32, pack_np_dtype=np.int32, pack_dtype_bits=32,
            pack_factor=32 // bits, planar=False,
        )  # fmt: skip
        pack(made, layer, scale.float(), zero.float(), groups.to(torch.int32))
        tensors = {"qweight": made.qweight, "scales": made.scales, "g_idx": made.g_idx, "dense": dense.contiguous()}
        found[f"gptq-{bits}-v2"] = tensors | {"qzeros": made.qzeros}
        if bits != 3:
            ones = int("1".zfill(bits) * (32 // bits), 2)
            found[f"gptq-{bits}"] = tensors | {"qzeros": made.qzeros - ones}
    return found


def main() -> None:
    """Make the file."""
    awq, gptq = map(Path, sys.argv[1:])
    cases = compressed_tensors() | bitsandbytes() | gpt_oss() | torchao() | autoawq(awq) | gptqmodel(gptq)
    tensors = {
        f"{case}/{name}": each.contiguous().clone() for case, found in cases.items() for name, each in found.items()
    }
    save_file(tensors, FILE)
    print(f"{len(cases)} cases, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
