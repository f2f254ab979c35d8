"""Chooses which kernels multiply how many tokens with their experts: as measured where it was, else by the cost model.

As in `pagebus.kernels.linear.dispatch`, a user's table comes before the shipped one, and nothing is timed while
serving. What neither has is decided by the rule, unless the cost model finds something clearly faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagebus.kernels.common.machines import machine_of
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import until_tables_change, user_folder
from pagebus.kernels.linear.dispatch import Source
from pagebus.kernels.linear.tables import table_path
from pagebus.kernels.moe.coded import CodedConfig
from pagebus.kernels.moe.launch.costs import Candidate, ExpertCosts
from pagebus.kernels.moe.launch.rule import by_rule, choose_invariant
from pagebus.kernels.moe.launch.shapes import (
    Config,
    ExpertsKernel,
    Shape,
    Unsorted,
    brought_here,
    bucket_of,
    buckets,
    kernel_of,
    last_bringing,
    rule_ends,
)
from pagebus.kernels.moe.launch.tables import TABLES, Table, load_table, load_user_table
from pagebus.kernels.moe.routing import WIDE_GRID
from pagebus.kernels.moe.sorting import FEW_PAIRS, MOST_PAIRS

MARGIN = 0.85
"""The rule keeps its place unless the cost model's best is below this share of it: of two estimates, each is off by 5%
in the mean."""


class Decision(NamedTuple):
    """Launch shapes, which source they are from, and why; ``us``: the cost model's estimate for them, if it decided."""

    config: Config
    source: Source
    why: str
    us: float | None = None


class ExpertsChoice(NamedTuple):
    """What is chosen for the experts of a layer; fields as of `pagebus.kernels.linear.dispatch.LinearChoice`."""

    kernel: ExpertsKernel
    form: str
    config: Config | CodedConfig | None
    why: str
    source: Source = Source.RULE
    us: float | None = None


def choose(num_tokens: int, shape: Shape, dtype: torch.dtype, target: Target | None) -> Config:
    """The launch shapes for this many tokens."""
    return decide(num_tokens, shape, dtype, target).config


def decide(num_tokens: int, shape: Shape, dtype: torch.dtype, target: Target | None) -> Decision:
    """The same, and why."""
    return _decide(bucket_of(num_tokens, shape), shape, dtype, target)


def choose_experts(
    num_tokens: int, shape: Shape, dtype: torch.dtype, target: Target | None, *, invariant: bool = False
) -> ExpertsChoice:
    """The kernels for this many tokens, and why."""
    if target is None:
        return ExpertsChoice(ExpertsKernel.TORCH, "experts", None, "a CPU")
    if invariant:
        config = choose_invariant(num_tokens, shape, dtype)
        why = "--deterministic: one order of sums for any number of tokens"
        return ExpertsChoice(kernel_of(config), "experts", config, why)
    found = decide(num_tokens, shape, dtype, target)
    return ExpertsChoice(kernel_of(found.config), "experts", found.config, found.why, found.source, found.us)


@until_tables_change
def _decide(bucket: int, shape: Shape, dtype: torch.dtype, target: Target | None) -> Decision:
    rule = by_rule(bucket, shape, dtype, target)
    how = "tokens have hardly an expert in common" if isinstance(rule, Unsorted) else "tokens sorted by expert"
    if dtype.itemsize != 2 or target is None:
        return Decision(rule, Source.RULE, how)
    found = measured(bucket, shape, target)
    if found is not None:
        config, source = found
        return Decision(config, source, f"{source}: these were fastest")
    return _modelled(bucket, shape, target, rule, how)


def measured(bucket: int, shape: Shape, target: Target) -> tuple[Config, Source] | None:
    """The launch shapes that tables have, and which of them; None: these experts were not measured."""
    tables = (user_table(target), Source.USER), (load_table(table_path(target, TABLES)), Source.MEASURED)
    return next(((table[shape][bucket], source) for table, source in tables if bucket in table.get(shape, {})), None)


def _modelled(bucket: int, shape: Shape, target: Target, rule: Config, how: str) -> Decision:
    """The rule's launch shapes, unless the cost model has better ones, or finds that these do not fit."""
    ranked, own = costs_of(target).ranked(bucket, shape, 1), costs_of(target).own(bucket, shape, rule)
    source = Source.MODEL
    if not ranked or (own is None and isinstance(rule, Unsorted)):
        return Decision(rule, Source.RULE, how)
    (us, config) = ranked[0]
    if own is not None and us >= MARGIN * own:
        return Decision(rule, source, f"{source}: {how}; should take {own:.1f} µs, and nothing clearly less", own)
    others = "the rule's do not fit" if own is None else f"the rule's {own:.1f}"
    return Decision(config, source, f"{source}: should take {us:.1f} µs, {others}", us)


@until_tables_change
def user_table(target: Target) -> Table:
    """What the user has measured on such a GPU."""
    folder = user_folder()
    return {} if folder is None else load_user_table(target, folder)


@until_tables_change
def costs_of(target: Target) -> ExpertCosts:
    """The cost model of a kind of GPU."""
    return ExpertCosts(machine_of(target))


def candidates_for(num_tokens: int, shape: Shape, target: Target, count: int) -> list[Candidate]:
    """The ``count`` that the cost model finds best, with their times, the fastest first."""
    return costs_of(target).ranked(num_tokens, shape, count)


def token_counts(shape: Shape, most: int, dtype: torch.dtype, target: Target | None, among: int = 0) -> list[int]:
    """Numbers of tokens up to ``most`` which together launch every kernel that fewer tokens than that may launch:
    between two of them nothing changes but the number of programs. ``among`` as in `brought_here`."""
    part = brought_here(1, shape, among)[1]
    known = buckets(part)
    chosen = [choose(bucket, part, dtype, target) for bucket in known]
    changes = {end for end, one, other in zip(known, chosen, chosen[1:], strict=False) if one != other}
    ends = {last_bringing(end, shape, among) for end in (*changes, *rule_ends(part))} | {WIDE_GRID}
    ends |= {(1 << bit) // shape.top_k for bit in range(FEW_PAIRS.bit_length() - 1, MOST_PAIRS.bit_length())}
    return sorted({most, *(end for end in ends if 0 < end < most)})
