"""Llama 4's experts: all in one tensor column by column, as it is published, or each in tensors of its own."""

from __future__ import annotations

import re

import torch

from tests.helpers.quantized.packers import Tensors

STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
GATE = re.compile(r"(.*\.experts)\.0\.gate_proj\.weight")


def taken_apart(tensors: Tensors) -> Tensors:
    """As llm-compressor stores them: rows of outputs."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = STACKED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        for expert, columns in enumerate(tensor):
            parts = columns.t().chunk(2) if match[2] == "gate_up_proj" else (columns.t(),)
            names = ("gate_proj", "up_proj") if len(parts) > 1 else ("down_proj",)
            for part, rows in zip(names, parts, strict=True):
                found[f"{match[1]}.{expert}.{part}.weight"] = rows.contiguous()
    return found


def put_together(tensors: Tensors) -> Tensors:
    """The reverse."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in tensors:
        if (match := GATE.fullmatch(name)) is not None:
            of = {part: _stacked(tensors, match[1], part) for part in ("gate_proj", "up_proj", "down_proj")}
            found[f"{match[1]}.gate_up_proj"] = torch.cat((of["gate_proj"], of["up_proj"]), 2)
            found[f"{match[1]}.down_proj"] = of["down_proj"]
    return found


def _stacked(tensors: Tensors, prefix: str, part: str) -> torch.Tensor:
    """[E, inputs, outputs]."""
    count = sum(name.startswith(f"{prefix}.") and name.endswith(f".{part}.weight") for name in tensors)
    return torch.stack([tensors[f"{prefix}.{expert}.{part}.weight"].t() for expert in range(count)])
