"""Registers, spills and shared memory of launch shapes of experts, as the compiler gave them ahead of time.

As `pagebus.kernels.linear.resources`; the tables in `resources/` are made by
``python -m tests.kernels.moe.compile_shapes``, with biases and the gate that needs most.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pagebus.kernels.common.resources import Resources, table_text, take_resources
from pagebus.kernels.linear.resources import family_of
from pagebus.kernels.moe.launch.candidates import Way
from pagebus.kernels.moe.launch.shapes import PRODUCT_CONFIGS, ExpertsKernel, GroupConfig, ProductConfig

FOLDER = Path(__file__).with_name("resources")


class Variant(NamedTuple):
    """A kernel as compiled: one of both products, ``gated`` or not."""

    way: Way
    config: ProductConfig
    gated: bool


@cache
def resources(capability: int) -> dict[Variant, Resources]:
    """What is known of the kernels for GPUs of this capability."""
    stored = json.loads((FOLDER / f"sm_{family_of(capability)}.json").read_text())
    return dict(map(_parse, stored["variants"]))


def needs_of(way: Way, config: ProductConfig, capability: int, *, gated: bool) -> Resources | None:
    """What a launch shape needs; None: it was not compiled."""
    one = replace(config, programs=0) if isinstance(config, GroupConfig) else config
    return resources(capability).get(Variant(way, one, gated))


def table(capability: int, triton: str, found: dict[Variant, Resources]) -> str:
    """The text of a table, a line for each variant."""
    return table_text(capability, triton, (_packed(variant, found[variant]) for variant in sorted(found, key=repr)))


def _packed(variant: Variant, needs: Resources) -> dict[str, Any]:
    (kernel, items), config, gated = variant
    return {"kernel": str(kernel), "items": items, "gated": gated, **asdict(config), **needs._asdict()}


def _parse(stored: dict[str, Any]) -> tuple[Variant, Resources]:
    fields = dict(stored)
    needs = take_resources(fields)
    kernel, items, gated = ExpertsKernel(fields.pop("kernel")), fields.pop("items"), fields.pop("gated")
    return Variant(Way(kernel, items), PRODUCT_CONFIGS[kernel](**fields), gated), needs
