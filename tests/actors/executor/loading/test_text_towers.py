"""Text towers of checkpoints with images, and other families' names: as transformers saves them, and as the hub has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagebus.actors.model.config import ModelConfig
from tests.actors.executor.models.test_families import PagedSequences, load
from tests.helpers.model_factory import DEFAULTS, redraw

VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {"model_type": "gemma3_text", "sliding_window": 20, "head_dim": 64},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None},
    ),
    "ministral3": (
        "Mistral3", {"model_type": "ministral3"},
    ),
}  # fmt: skip


def save_tower(folder: Path, name: str) -> Any:
    """A tiny model with images saved in ``folder``; the model."""
    kind, fields = TOWERS[name]
    config_class = getattr(transformers, f"{kind}Config")  # here: transformers reads its model's code at the first look
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    text = {**DEFAULTS, **fields}
    tied = text.pop("tie_word_embeddings")
    vision = VISION if name == "gemma3" else {**VISION, "model_type": "pixtral", "head_dim": 8}
    config = config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    config.dtype = torch.float32
    model = model_class._from_config(config, attn_implementation="eager").eval()
    redraw(model, 1)
    model.save_pretrained(str(folder))
    return model


def as_on_the_hub(name: str) -> str:
    """The name that such a tensor has in repositories."""
    if name.startswith("model.language_model."):
        return f"language_model.model.{name.removeprefix('model.language_model.')}"
    return f"language_model.{name}" if name.startswith("lm_head") else name.removeprefix("model.")


@pytest.mark.parametrize("rename", [None, as_on_the_hub])
@pytest.mark.parametrize("name", TOWERS)
def test_text_of_a_model_with_images(name: str, rename: Callable[[str], str] | None, tmp_path: Path) -> None:
    """The language model is found behind its prefix, and gives the logits that the whole model gives for text."""
    model = save_tower(tmp_path, name)
    if rename is not None:
        tensors = load_file(tmp_path / "model.safetensors")
        save_file({rename(key): value for key, value in tensors.items()}, tmp_path / "model.safetensors")
    ids = [5, 250, 17, 99, 3] * 9
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0]

    assert ModelConfig.load(tmp_path).architecture.endswith("ForConditionalGeneration")
    got = PagedSequences(load(tmp_path), 1).forward([ids])[0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
