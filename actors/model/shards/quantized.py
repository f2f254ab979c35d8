"""What a rank takes of a quantized weight: whole groups and whole blocks of those numbers that share a scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.family import NameMap
from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.actors.model.shards.cuts import Cut, cut_of
from pagebus.actors.model.shards.shard import Shard


def module_cut(module: str, stacked: bool, shard: Shard | None, names: NameMap) -> Cut | None:
    """What the rank takes of a module's weight [N, K], or of the [E, N, K] of all experts, which are ``stacked``; None:
    all of it. Raises ModelError."""
    if shard is None:
        return None
    return (
        cut_of(module, shard, replace(names, columns_first=False))
        if stacked
        else cut_of(f"{module}.weight", shard, names)
    )


def check_whole_groups(module: str, cut: Cut | None, scheme: Scheme, shape: Sequence[int], world: int) -> None:
    """Whether no group or block of the weight ``shape`` [N, K] or [E, N, K] lies on two ranks.

    Raises:
        ModelError: one does, or its columns are in an order of their own; the text names the module and what the ranks'
            shares have to be multiples of.
    """
    if cut is None or cut.dim == len(shape) - 3:  # whole experts
        return
    by_rows, flag = cut.dim == len(shape) - 2, f"--tensor-parallel-size {world}: {module}"
    unit, what = (scheme.block[0], "rows") if by_rows else (scheme.block[1], "columns")
    if scheme.ordered and not by_rows:
        raise ModelError(
            f"{flag} has columns in an order of their own (act-order), which ranks cannot divide ({scheme})"
        )
    if unit <= 1 or unit >= cut.whole:
        return
    ends = [end for each in cut.ranges for end in (each.start, each.stop)]
    if any(end % unit and end != cut.whole for end in ends):
        raise ModelError(
            f"{flag} has {cut.whole} {what} with a scale for every {unit} of them: the share of each rank has to be a "
            f"multiple of {unit} ({scheme})"
        )
