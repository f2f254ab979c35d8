"""Quantized checkpoints made of tiny models, and beside each the same model with dequantized weights in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.quantized.packers import Packer, Tensors

PRODUCTS = re.compile(r"\.layers\.\d+\..*(_proj|\.w[123])\.weight$")


def tensors_of(folder: Path) -> Tensors:
    """All tensors of the one weight file."""
    return load_file(folder / "model.safetensors")


def write(folder: Path, like: Path, tensors: Tensors, quantization: object = None) -> Path:
    """A model's folder with these tensors, and the configuration of another."""
    folder.mkdir()
    config = json.loads((like / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def quantize(
    model: Path, folder: Path, packer: Packer, chosen: Callable[[str], object] = PRODUCTS.search
) -> tuple[Path, Path]:
    """The checkpoint of a float32 model with the ``chosen`` weights packed, and the model that it means."""
    quantized: Tensors = {}
    dense: Tensors = {}
    for name, tensor in tensors_of(model).items():
        if not chosen(name):
            quantized[name] = dense[name] = tensor
            continue
        packed, dense[name] = packer.pack(tensor)
        module = name.removesuffix(".weight")
        quantized |= {f"{module}.{suffix}": each.clone() for suffix, each in packed.items()}
    return write(folder / "quantized", model, quantized, packer.config), write(folder / "dense", model, dense)


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    """Rewrite the weight file of ``folder``."""
    tensors = {name: tensor.clone() for name, tensor in tensors_of(folder).items()}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def noise(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A weight with large and small rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator).add(0.05)
