"""Reads an adapter into host memory, and makes sure that it is the one that was registered.

A rank reads all of the file, for the digest is of all of it, and keeps what its part of the model multiplies by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from pagebus.actors.executor.adapters.experts import HostExperts, of_all, own_experts
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import Adapter, open_adapter
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.actors.model.lora.location import locate
from pagebus.actors.model.lora.projections import EMBEDDING, EXPERTS, projections
from pagebus.actors.model.shards.cuts import Cut, cut_of
from pagebus.actors.model.shards.local import whole_config
from pagebus.bus.messages import AdapterSource

FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class HostModule:
    """A [rank, inputs], B [outputs, rank] and the scale of one module; of a rank, with its own inputs or outputs.
    ``bias`` [outputs] is what is added beside them, if there is one."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    bias: torch.Tensor | None = None


HostAdapter = Mapping[str, HostModule | HostExperts]
"""By our names of modules, those of experts without their numbers."""
Read = Callable[[AdapterSource], HostAdapter]


def reader(config: ModelConfig, max_rank: int, dtype: torch.dtype, targets: Collection[str] = ()) -> Read:
    """A function that reads adapters of a model, or of a rank's part of one, whose steps are computed in ``dtype``.
    ``targets``: as of :func:`open_adapter`."""
    whole = whole_config(config)

    def read(source: AdapterSource) -> HostAdapter:
        """Raises AdapterError."""
        adapter = open_adapter(locate(source.path).folder, whole, max_rank, targets)
        numbers, digest = adapter.read()
        if digest != source.digest:
            raise AdapterError(f"the files at {source.path} have changed since it was loaded: load it again")
        tensors = {
            each.name: torch.from_numpy(numbers.of(each)).view(FORMATS[each.format]).view(each.shape).to(dtype)
            for each in adapter.tensors()
        }
        return _parts(adapter, tensors, config)

    return read


def _parts(adapter: Adapter, tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> HostAdapter:
    """What the model, or a rank, needs of an adapter's tensors."""
    shard, names, found = config.shard, config.names, dict[str, HostModule | HostExperts]()
    for projection in projections(whole_config(config), (EXPERTS,)):
        for name, each in of_all(projection, adapter.modules, tensors, names).items():
            found[name] = each if shard is None else own_experts(name, each, shard, names)
    for name, pair in adapter.modules.items():
        if pair.of_expert:
            continue
        whole = shard is None or name == EMBEDDING  # each rank adds all of that to the sum of all
        taken = None if shard is None or whole else cut_of(f"{name}.weight", shard, names)
        a, b = tensors[pair.a.name], tensors[pair.b.name]
        if taken is not None:
            a, b = own_part(taken, "A", a), own_part(taken, "B", b)
        bias = None if pair.bias is None else tensors[pair.bias.name] * pair.scale
        if bias is not None and taken is not None and shard is not None:
            bias = own_bias(taken, bias, leads=shard.leads)
        found[name] = HostModule(a, b, pair.scale, bias)
    return found


def own_part(cut: Cut, matrix: str, values: torch.Tensor) -> torch.Tensor:
    """What a rank needs of A [rank, inputs] or of B [outputs, rank], where it has that ``cut`` of the weight [outputs,
    inputs]: its outputs of B and all of A, or its inputs of A and all of B."""
    dim, divided = (0, "B") if cut.dim == 0 else (1, "A")
    if matrix != divided:
        return values
    return torch.cat([values.narrow(dim, each.start, len(each)) for each in cut.ranges], dim)


def own_bias(cut: Cut, values: torch.Tensor, *, leads: bool) -> torch.Tensor:
    """What a rank adds of a bias [outputs]: its outputs', or, where ranks add up, all on the one that ``leads``."""
    if cut.dim == 0:
        return torch.cat([values[each.start : each.stop] for each in cut.ranges])
    return values if leads else torch.zeros_like(values)
