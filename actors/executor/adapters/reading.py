"""Reads an adapter into host memory, and makes sure that it is the one that was registered.

A rank reads all of the file, for the digest is of all of it, and keeps what its part of the model multiplies by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from operator import attrgetter

import torch

from pagebus.actors.executor.adapters.experts import HostExperts, Tensors, of_all, own_experts
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import AdapterFolders, AdapterShape
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.actors.model.lora.location import locate
from pagebus.actors.model.lora.projections import EMBEDDING, Projection, all_projections
from pagebus.actors.model.lora.tensor_file import FileTensor, Numbers
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


@dataclass(frozen=True, slots=True)
class AdapterNumbers:
    """What was read: the numbers of all tensors of ``shape``, one behind the other in the format of the steps, and the
    scales of modules."""

    shape: AdapterShape
    values: torch.Tensor
    scales: Mapping[str, float]

    def parts(self, config: ModelConfig) -> HostAdapter:
        """What a model, or a rank's part of one, needs of it."""
        tensors = in_order(self.shape, lambda begin, end: self.values[begin:end])
        found = dict[str, HostModule | HostExperts]()
        for projection in all_projections(whole_config(config)):
            found |= parts_of(projection, self.shape, tensors, self.scales, config)
        return found


Read = Callable[[AdapterSource], AdapterNumbers]


def reader(config: ModelConfig, max_rank: int, dtype: torch.dtype, targets: Collection[str] = ()) -> Read:
    """A function that reads adapters of a model, or of a rank's part of one, whose steps are computed in ``dtype``.
    ``targets``: as of :class:`AdapterFolders`."""
    return partial(_read, AdapterFolders(whole_config(config), max_rank, targets), dtype)


def _read(folders: AdapterFolders, dtype: torch.dtype, source: AdapterSource) -> AdapterNumbers:
    """Raises AdapterError."""
    adapter = folders.open(locate(source.path).folder)
    numbers, digest = adapter.read()
    if digest != source.digest:
        raise AdapterError(f"the files at {source.path} have changed since it was loaded: load it again")
    return AdapterNumbers(adapter.shape, _values(adapter.shape.tensors, numbers, dtype), adapter.scales())


def _values(tensors: Sequence[FileTensor], numbers: Numbers, dtype: torch.dtype) -> torch.Tensor:
    """All numbers in this format, copied only if they are in another: in one call for all that have one."""
    if {FORMATS[each.format] for each in tensors} == {dtype}:
        return torch.from_numpy(numbers.raw).view(dtype)
    values, begin = torch.empty(sum(each.size for each in tensors), dtype=dtype), 0
    for form, run in groupby(tensors, attrgetter("format")):
        read = torch.from_numpy(numbers.of(*run)).view(FORMATS[form])
        values[begin : begin + len(read)] = read
        begin += len(read)
    return values


def in_order(shape: AdapterShape, values: Callable[[int, int], torch.Tensor]) -> Tensors:
    """The tensors of a file whose numbers, from one to another in its order, are such ``values``."""
    sizes = {each.start: each.size for each in shape.tensors}
    ends = dict(zip(sizes, accumulate(sizes.values()), strict=True))
    return lambda tensor: values(ends[tensor.start] - sizes[tensor.start], ends[tensor.start]).view(tensor.shape)


def parts_of(
    projection: Projection, shape: AdapterShape, tensors: Tensors, scales: Mapping[str, float], config: ModelConfig
) -> HostAdapter:
    """What a model, or a rank's part of one, needs for a ``projection`` of the whole."""
    shard, names, found = config.shard, config.names, dict[str, HostModule | HostExperts]()
    if projection.experts:
        for name, each in of_all(projection, shape.modules, tensors, scales, names).items():
            found[name] = each if shard is None else own_experts(name, each, shard, names)
        return found
    for name in projection.modules:
        if (pair := shape.modules.get(name)) is None:
            continue
        whole = shard is None or name == EMBEDDING  # each rank adds all of that to the sum of all
        taken = None if shard is None or whole else cut_of(f"{name}.weight", shard, names)
        a, b = tensors(pair.a), tensors(pair.b)
        if taken is not None:
            a, b = own_part(taken, "A", a), own_part(taken, "B", b)
        bias = None if pair.bias is None else tensors(pair.bias) * scales[name]
        if bias is not None and taken is not None and shard is not None:
            bias = own_bias(taken, bias, leads=shard.leads)
        found[name] = HostModule(a, b, scales[name], bias)
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
