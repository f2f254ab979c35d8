"""Matrices of all experts of a layer, as one tensor each, from either form in which files have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pagebus.actors.model.family import NameMap
from pagebus.actors.model.lora.matching import Matrices
from pagebus.actors.model.lora.projections import Projection
from pagebus.actors.model.lora.tensor_file import FileTensor
from pagebus.actors.model.shards.cuts import Cut, cut_of
from pagebus.actors.model.shards.shard import Shard

Tensors = Callable[[FileTensor], torch.Tensor]
"""Says what is in each tensor of a file."""


@dataclass(frozen=True, slots=True)
class HostExperts:
    """Of E experts: A [E, rank, inputs], B [E, outputs, rank] and the scales [E] of one module; of a rank, of its own
    experts, inputs or outputs. An expert that is not adapted has zeros."""

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor


def of_all(
    projection: Projection,
    modules: Mapping[str, Matrices],
    tensors: Tensors,
    scales: Mapping[str, float],
    names: NameMap,
) -> dict[str, HostExperts]:
    """The modules of a projection that an adapter has, whole: gate and up, or both in one, or down."""
    if (both := modules.get(projection.fused)) is not None and both.experts:
        by_turns = names.gates_by_turns and len(projection.modules) > 1
        return {projection.fused: _stacked(both, tensors, scales[projection.fused], by_turns=by_turns)}
    found = {}
    for module, width in zip(projection.modules, projection.widths, strict=True):
        prefix, _, part = module.rpartition(".")
        ones = {
            number: name for number in range(projection.experts) if (name := f"{prefix}.{number}.{part}") in modules
        }
        if ones:
            found[module] = _one_by_one(ones, modules, tensors, scales, projection, width)
    return found


def own_experts(module: str, found: HostExperts, shard: Shard, names: NameMap) -> HostExperts:
    """What a rank needs of it: all of its own experts, or of each the inputs or outputs that it has."""
    if shard.by_expert:
        own = shard.of(len(found.a))
        return HostExperts(*(each[own.start : own.stop] for each in (found.a, found.b, found.scales)))
    prefix, _, part = module.rpartition(".")
    width = found.b.shape[1] // 2
    cut = cut_of(f"{prefix}.0.{'gate_proj' if part == 'gate_up_proj' else part}.weight", shard, names)
    if cut is None:
        return found
    if part == "down_proj":
        return HostExperts(_taken(found.a, 2, cut), found.b, found.scales)
    if part == "gate_up_proj":
        second = (range(width + each.start, width + each.stop) for each in cut.ranges)
        cut = Cut(0, 2 * width, (*cut.ranges, *second))
    return HostExperts(found.a, _taken(found.b, 1, cut), found.scales)


def _taken(values: torch.Tensor, dim: int, cut: Cut) -> torch.Tensor:
    return torch.cat([values.narrow(dim, each.start, len(each)) for each in cut.ranges], dim)


def _stacked(each: Matrices, tensors: Tensors, scale: float, *, by_turns: bool) -> HostExperts:
    """``by_turns``: outputs of gate and up alternate."""
    first, second = tensors(each.a), tensors(each.b)
    a = first.view(each.experts, each.rank, -1)
    b = second.view(len(second), each.rank, each.experts).permute(2, 0, 1)
    if each.transposed:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    if by_turns:
        b = torch.cat((b[:, ::2], b[:, 1::2]), 1)
    return HostExperts(a, b, torch.full((each.experts,), scale))


def _one_by_one(
    ones: Mapping[int, str],
    modules: Mapping[str, Matrices],
    tensors: Tensors,
    scales: Mapping[str, float],
    projection: Projection,
    width: int,
) -> HostExperts:
    """Of experts of different ranks all are as wide as the largest."""
    rank = max(modules[name].rank for name in ones.values())
    like = tensors(modules[next(iter(ones.values()))].a)
    a = like.new_zeros(projection.experts, rank, projection.inputs)
    b, scale = like.new_zeros(projection.experts, width, rank), torch.zeros(projection.experts)
    for number, name in ones.items():
        each = modules[name]
        a[number, : each.rank] = tensors(each.a)
        b[number, :, : each.rank] = tensors(each.b)
        scale[number] = scales[name]
    return HostExperts(a, b, scale)
