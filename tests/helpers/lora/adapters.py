"""Random adapters in PEFT's format, and the models of transformers that have them merged in."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import digest_of, open_adapter
from pagebus.bus.messages import AdapterSource
from tests.helpers.model_factory import greedy_answers, load_reference

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path, base: Path, *, seed: int, rank: int = 4, alpha: float = 8.0, targets: Sequence[str] = ALL,
    ranks: Mapping[str, int] | None = None, std: float = 0.3, dtype: torch.dtype = torch.float32, **fields: Any,
) -> Path:  # fmt: skip
    """Save a random adapter of the model in ``base``; ``ranks`` are those of modules whose names end so, ``fields``
    further ones of its configuration."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in load_reference(base).named_modules():
        last = name.rpartition(".")[2]
        if last not in targets or not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            continue
        size = (ranks or {}).get(last, rank)
        if isinstance(module, torch.nn.Embedding):
            for matrix, shape in (("A", (size, module.num_embeddings)), ("B", (module.embedding_dim, size))):
                values = torch.empty(shape).normal_(0, std, generator=generator).to(dtype)
                tensors[f"base_model.model.{name}.lora_embedding_{matrix}"] = values
            continue
        a, b = torch.empty(size, module.in_features), torch.empty(module.out_features, size)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.normal_(0, std, generator=generator).to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.normal_(0, std, generator=generator).to(dtype)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": list(targets),
        "rank_pattern": dict(ranks or {}), "bias": "none", "base_model_name_or_path": str(base), **fields,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def source_of(folder: Path, base: Path, name: str = "", targets: Sequence[str] = ()) -> AdapterSource:
    """As an ingress names it to the other actors."""
    adapter = open_adapter(folder, ModelConfig.load(base), 512, targets)
    return AdapterSource(name=name or folder.name, path=str(folder), digest=digest_of(adapter))


def merged(base: Path, adapter: Path | None) -> Any:
    """The model with W + scale B A for each W, by transformers."""
    model = load_reference(base)
    if adapter is None:
        return model
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(embedding_)?A(\.weight)?", name)
        if match is None:
            continue
        module, last = match[1], match[1].rpartition(".")[2]
        alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        weight = model.get_submodule(module).weight
        b = tensors[name.replace("A.weight", "B.weight") if match[3] else f"{name[:-1]}B"].float()
        with torch.no_grad():
            weight += scale * (a.float().T @ b.T if match[2] else b @ a.float())
    return model


def greedy(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Continuations by transformers, float32."""
    return greedy_answers(model, prompts, max_tokens)
