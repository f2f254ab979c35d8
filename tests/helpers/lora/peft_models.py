"""PEFT itself: adapters as it saves them, and what its own forward pass generates with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.helpers.lora.adapters import greedy
from tests.helpers.model_factory import load_reference

STD = 0.3
"""Of all matrices: so wide that no two adapters agree for long."""


def save_with_peft(base: Path, folder: Path, *, seed: int, **fields: Any) -> Path:
    """Save an adapter of random numbers; ``fields`` are those of ``peft.LoraConfig``."""
    import peft

    generator = torch.Generator().manual_seed(seed)
    model = peft.get_peft_model(load_reference(base), peft.LoraConfig(task_type="CAUSAL_LM", **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, STD, generator=generator)
    model.save_pretrained(str(folder))
    return folder


def generated_by_peft(
    base: Path, folders: Sequence[Path], prompts: Sequence[Sequence[Sequence[int]]], max_tokens: int
) -> list[list[list[int]]]:
    """Of each adapter in turn: greedy continuations of its prompts, float32, with the adapters beside the weights."""
    import peft

    model = peft.PeftModel.from_pretrained(load_reference(base), str(folders[0]), adapter_name="0")
    for index, folder in enumerate(folders[1:], 1):
        model.load_adapter(str(folder), adapter_name=str(index))
    answers = []
    for index, asked in enumerate(prompts):
        model.set_adapter(str(index))
        answers.append(greedy(model.eval(), asked, max_tokens))
    return answers
