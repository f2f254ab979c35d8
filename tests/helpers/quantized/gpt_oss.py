"""gpt-oss as it is published, made of a tiny one: experts in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers.quantized.checkpoints import tensors_of, write
from tests.helpers.quantized.packers import Tensors, fours, mx_codes

KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
CONFIG: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}


def packed(stacked: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """[E, K, N], inputs first -> blocks and scales, and what they mean in the same order."""
    blocks, scales, dense = [], [], []
    for expert in stacked:
        codes, exponent, meant = mx_codes(expert.t().contiguous())
        blocks.append(fours(codes.flatten(1)).view(*exponent.shape, 16))
        scales.append(exponent)
        dense.append(meant.t())
    return {"blocks": torch.stack(blocks), "scales": torch.stack(scales)}, torch.stack(dense)


def quantize_experts(model: Path, folder: Path) -> tuple[Path, Path]:
    """The checkpoint with packed experts, and the model that it means."""
    quantized: Tensors = {}
    dense: Tensors = {}
    for name, tensor in tensors_of(model).items():
        if tensor.dim() == 3:
            parts, dense[name] = packed(tensor)
            quantized |= {f"{name}_{part}": each for part, each in parts.items()}
        else:
            quantized[name] = dense[name] = tensor
    return write(folder / "quantized", model, quantized, CONFIG), write(folder / "dense", model, dense)
