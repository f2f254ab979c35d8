"""Random adapters of all experts in one tensor, and transformers' models with them merged in, without PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.lora.adapters import greedy
from tests.helpers.model_factory import load_reference

PRODUCTS = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""What PEFT calls the wrapper of each."""


def save_expert_adapter(base: Path, folder: Path, *, seed: int, rank: int, std: float = 0.3) -> Path:
    """Of both products of all layers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_reference(base).named_parameters():
        module, _, part = name.rpartition(".")
        if not module.endswith(".experts") or part not in PRODUCTS:
            continue
        count, outputs, inputs = weight.shape if not _has_columns_first(base) else weight.transpose(1, 2).shape
        shapes = {"A": (count * rank, inputs), "B": (outputs, rank * count)}
        for matrix, shape in shapes.items():
            values = torch.empty(shape).normal_(0, std, generator=generator)
            tensors[f"base_model.model.{module}{PRODUCTS[part]}.lora_{matrix}.weight"] = values
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "peft_version": "0.21.2"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_parameters": list(PRODUCTS)}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def with_expert_adapter(base: Path, folder: Path) -> Any:
    """The model with W + 2 B A for each W of an expert."""
    model, tensors = load_reference(base), load_file(folder / "adapter_model.safetensors")
    rank = json.loads((folder / "adapter_config.json").read_text())["r"]
    for name, weight in model.named_parameters():
        module, _, part = name.rpartition(".")
        a = tensors.get(f"base_model.model.{module}{PRODUCTS.get(part, '')}.lora_A.weight")
        if a is None or part not in PRODUCTS:
            continue
        b = tensors[f"base_model.model.{module}{PRODUCTS[part]}.lora_B.weight"]
        delta = torch.einsum("ore,eri->eoi", b.view(len(b), rank, -1), a.view(-1, rank, a.shape[1]))
        with torch.no_grad():
            weight += 2 * (delta.transpose(1, 2) if _has_columns_first(base) else delta)
    return model


def told_with(base: Path, folder: Path, asked: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """What the model says with an adapter."""
    return greedy(with_expert_adapter(base, folder), asked, max_tokens)


def _has_columns_first(base: Path) -> bool:
    return bool(json.loads((base / "config.json").read_text())["model_type"] == "gpt_oss")
