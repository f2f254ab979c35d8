"""Describes the tensors of a GGUF file as those of safetensors files are."""

from __future__ import annotations

from pathlib import Path

from pagebus.actors.executor.loading.weight_copy import StoredTensor
from pagebus.actors.model.gguf.architectures import find_architecture
from pagebus.actors.model.gguf.files import read_file
from pagebus.actors.model.gguf.metadata import Metadata
from pagebus.actors.model.gguf.names import our_tensors


def gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    """By our names. Raises ModelError."""
    file = read_file(path)
    found = our_tensors(file, find_architecture(Metadata(file)).names)
    return {
        name: StoredTensor(each.file, each.offset, each.type, each.shape, each.num_bytes)
        for name, each in found.items()
    }  # fmt: skip
