"""Tables of rotary embeddings, of every kind that a :class:`~pagebus.actors.model.spec.RopeSpec` names.

Kernels turn dimension i of a head with dimension i + D / 2. Models that pair neighbours, or turn a part of each head,
have the rows of their projections reordered at load (:func:`head_order`): a score does not depend on the order.
"""

from __future__ import annotations

import math

import torch

from pagebus.actors.model.spec import QueryScale, RopeSpec


def rotary_table(rope: RopeSpec | None, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines of every position: [num_positions, head_dim] float32, the halves cos | sin. What does not turn
    has cosines of 1, None: nothing turns."""
    turned = 0 if rope is None else rope.dims // 2
    table = torch.zeros((num_positions, 2, head_dim // 2), dtype=torch.float32, device=device)
    table[:, 0].fill_(1.0)
    if rope is not None:
        angles = torch.arange(num_positions, device=device, dtype=torch.float32).outer(
            frequencies(rope, num_positions).to(device)
        )
        table[:, 0, :turned] = angles.cos() * rope.attention_factor
        table[:, 1, :turned] = angles.sin() * rope.attention_factor
    return table.view(num_positions, head_dim)


def head_order(rope: RopeSpec | None, head_dim: int) -> list[int] | None:
    """Which of a head's dimensions come first, second and so on in our kernels; None: all stay in their places."""
    if rope is None:
        return None
    dims, half = rope.dims, rope.dims // 2
    firsts, seconds = range(half), range(half, dims)
    if rope.layout == "pairs":
        firsts, seconds = range(0, dims, 2), range(1, dims, 2)
    middle = dims + (head_dim - dims) // 2
    order = [*firsts, *range(dims, middle), *seconds, *range(middle, head_dim)]
    return None if order == list(range(head_dim)) else order


def query_factors(scale: QueryScale | None, num_positions: int, device: torch.device) -> torch.Tensor | None:
    """By what queries of each position are multiplied, [num_positions, 1, 1] float32; None: by 1."""
    if scale is None or num_positions + scale.shift <= scale.original:
        return None
    places = torch.arange(num_positions, device=device) + scale.shift
    return (1 + scale.beta * torch.log(1 + torch.floor(places / scale.original))).view(-1, 1, 1)


def frequencies(rope: RopeSpec, num_positions: int) -> torch.Tensor:
    """Radians per token of each pair of dimensions, for a process of this many positions: [dims / 2] float32."""
    exponents = torch.arange(0, rope.dims, 2, dtype=torch.float32) / rope.dims
    plain = torch.pow(_base(rope, num_positions), exponents).reciprocal()
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    if rope.kind == "longrope":
        factors = rope.long if num_positions > rope.original else rope.short
        return (torch.tensor(factors, dtype=torch.float32) * torch.pow(rope.base, exponents)).reciprocal()
    return plain


def _base(rope: RopeSpec, num_positions: int) -> float:
    """A larger one where dynamic scaling stretches the positions."""
    if rope.kind != "dynamic":
        return rope.base
    length = max(num_positions, rope.original)
    stretch = rope.factor * length / rope.original - (rope.factor - 1)
    return float(rope.base * stretch ** (rope.dims / (rope.dims - 2)))


def _llama3(plain: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Waves that went round often in the first training stay, slow ones are stretched, those between are blended."""
    waves = 2 * math.pi / plain
    between = rope.high - rope.low or 1.0  # of equal bounds, as Llama 4 Scout has them, no wave lies between
    share = (rope.original / waves - rope.low) / between
    blended = (1 - share) * plain / rope.factor + share * plain
    stretched = torch.where(waves > rope.original / rope.low, plain / rope.factor, blended)
    return torch.where(waves < rope.original / rope.high, plain, stretched)


def _yarn(plain: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """The same by a ramp over the pairs, from those that went round ``high`` times to those that did ``low`` times."""

    def pair(turns: float) -> float:
        return rope.dims * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    first, last = pair(rope.high), pair(rope.low)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dims - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(rope.dims // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    return (rope.factor / plain).reciprocal() * (1 - kept) + plain * kept
