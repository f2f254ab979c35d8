"""The library's products with weights, by the algorithm whose tiles fill their rounds, where these decide."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from threading import Lock

import torch
import torch.nn.functional as F

from pagebus.kernels.common.target import HOPPER, target_of
from pagebus.kernels.cublas import binding
from pagebus.kernels.cublas.binding import LtError, Proposal
from pagebus.kernels.cublas.plan import ALIGNMENT, Plan, Shape
from pagebus.kernels.cublas.tiles import fastest, rounds_decide

_biases = Lock()
"""A bias belongs to a plan until its product is launched."""


def set_up_library(device: torch.device) -> None:
    """Make the library ready on a GPU, which cannot be done while a graph is captured there."""
    if target_of(device) is not None and device.type != "meta" and binding.library() is not None:
        with suppress(LtError):  # then it chooses all algorithms
            binding.handle(device.index or 0)


def library_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N]."""
    if _may_choose(x, weight, 1):
        out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
        if _multiply(x, weight, bias, out, 1):
            return out
    return F.linear(x, weight, bias)


def library_sums(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed into ``out`` [parts, T, N] float32: a sum for each part of K."""
    parts = len(out)
    if not (_may_choose(x, weight, parts) and _multiply(x, weight, None, out, parts)):
        inputs = x.unflatten(1, (parts, -1)).transpose(0, 1)
        rows = weight.unflatten(1, (parts, -1)).permute(1, 2, 0)
        torch.bmm(inputs, rows, out_dtype=torch.float32, out=out)
    return out


@lru_cache(maxsize=4096)
def planned(shape: Shape, multiprocessors: int) -> tuple[Plan, Proposal] | None:
    """A product's plan with the proposal that should be fastest; None: the library is to choose."""
    try:
        plan = Plan(shape)
        proposed = [binding.tile_of(proposal) for proposal in plan.proposals]
    except LtError:
        return None
    index = fastest(proposed, shape.num_rows, shape.num_tokens, shape.parts, multiprocessors)
    return None if index is None else (plan, plan.proposals[index])


def _may_choose(x: torch.Tensor, weight: torch.Tensor, parts: int) -> bool:
    """Cheap enough for every product."""
    target = target_of(x.device)
    if target is None or x.is_meta or x.dtype not in binding.TYPES:
        return False
    decide = rounds_decide(len(weight), len(x), parts, target.num_multiprocessors)
    return decide and target.capability == HOPPER and binding.library() is not None


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, parts: int) -> bool:
    """Into ``out``, which has just been made; False: nothing was done, the library is to choose."""
    matrices = (x, weight) if bias is None else (x, weight, bias)
    if not all(map(_is_aligned, matrices)) or not weight.is_contiguous():
        return False
    target = target_of(x.device)
    assert target is not None
    sizes = len(x), len(weight), x.shape[1], x.stride(0)
    shape = Shape(*sizes, x.dtype, x.device.index, bias is not None, parts)
    found = planned(shape, target.num_multiprocessors)
    if found is None:
        return False
    plan, proposal = found
    if bias is None:
        plan.launch(proposal, x, weight, out)
        return True
    with _biases:
        plan.set_bias(bias)
        plan.launch(proposal, x, weight, out)
    return True


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Whether all of its rows begin at multiples of ALIGNMENT bytes."""
    distance = matrix.stride(0) * matrix.element_size() if matrix.dim() > 1 else 0
    return matrix.stride(-1) == 1 and matrix.data_ptr() % ALIGNMENT == 0 and distance % ALIGNMENT == 0
