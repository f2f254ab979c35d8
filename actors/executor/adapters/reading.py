"""Reads an adapter into host memory, and makes sure that it is the one that was registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import Digest, open_adapter
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.actors.model.lora.location import locate
from pagebus.bus.messages import AdapterSource

FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HostModule:
    """A [rank, inputs], B [outputs, rank] and the scale of one module."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


HostAdapter = Mapping[str, HostModule]
"""By our names of modules."""
Read = Callable[[AdapterSource], HostAdapter]


def reader(config: ModelConfig, max_rank: int, dtype: torch.dtype) -> Read:
    """A function that reads adapters of a model whose steps are computed in ``dtype``."""

    def read(source: AdapterSource) -> HostAdapter:
        """Raises AdapterError."""
        adapter = open_adapter(locate(source.path).folder, config, max_rank)
        digest, tensors = Digest(adapter.config), {}
        for tensor, raw in adapter.read():
            digest.add(tensor, raw)
            values = torch.frombuffer(bytearray(raw), dtype=FORMATS[tensor.format]).view(tensor.shape)
            tensors[tensor.name] = values.to(dtype)
        if digest.text() != source.digest:
            raise AdapterError(f"the files at {source.path} have changed since it was loaded: load it again")
        return {
            name: HostModule(tensors[each.a.name], tensors[each.b.name], each.scale)
            for name, each in adapter.modules.items()
        }

    return read
