"""Reads an adapter into host memory, and makes sure that it is the one that was registered.

A rank reads all of the file, for the digest is of all of it, and keeps what its part of the model multiplies by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import Digest, open_adapter
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.actors.model.lora.location import locate
from pagebus.actors.model.shards.cuts import Cut, cut_of
from pagebus.actors.model.shards.local import whole_config
from pagebus.bus.messages import AdapterSource

FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HostModule:
    """A [rank, inputs], B [outputs, rank] and the scale of one module; of a rank, with its own inputs or outputs."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


HostAdapter = Mapping[str, HostModule]
"""By our names of modules."""
Read = Callable[[AdapterSource], HostAdapter]


def reader(config: ModelConfig, max_rank: int, dtype: torch.dtype) -> Read:
    """A function that reads adapters of a model, or of a rank's part of one, whose steps are computed in ``dtype``."""
    whole, shard = whole_config(config), config.shard

    def cut(module: str, matrix: str, values: torch.Tensor) -> torch.Tensor:
        taken = None if shard is None else cut_of(f"{module}.weight", shard, config.names)
        return values if taken is None else own_part(taken, matrix, values)

    def read(source: AdapterSource) -> HostAdapter:
        """Raises AdapterError."""
        adapter = open_adapter(locate(source.path).folder, whole, max_rank)
        places = {pair.a.name: (module, "A") for module, pair in adapter.modules.items()}
        places |= {pair.b.name: (module, "B") for module, pair in adapter.modules.items()}
        digest, tensors = Digest(adapter.config), {}
        for tensor, raw in adapter.read():
            digest.add(tensor, raw)
            values = torch.frombuffer(bytearray(raw), dtype=FORMATS[tensor.format]).view(tensor.shape)
            tensors[tensor.name] = cut(*places[tensor.name], values).to(dtype)
        if digest.text() != source.digest:
            raise AdapterError(f"the files at {source.path} have changed since it was loaded: load it again")
        return {
            name: HostModule(tensors[each.a.name], tensors[each.b.name], each.scale)
            for name, each in adapter.modules.items()
        }

    return read


def own_part(cut: Cut, matrix: str, values: torch.Tensor) -> torch.Tensor:
    """What a rank needs of A [rank, inputs] or of B [outputs, rank], where it has that ``cut`` of the weight [outputs,
    inputs]: its outputs of B and all of A, or its inputs of A and all of B."""
    dim, divided = (0, "B") if cut.dim == 0 else (1, "A")
    if matrix != divided:
        return values
    return torch.cat([values.narrow(dim, each.start, len(each)) for each in cut.ranges], dim)
