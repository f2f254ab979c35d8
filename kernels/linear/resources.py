"""Registers, spills and shared memory of launch shapes, as the compiler gave them ahead of time for kinds of GPU.

The tables in `resources/` are made by ``python -m tests.kernels.linear.compile_shapes``, which needs no GPU. GPUs of
one family share a table. A launch shape that spills, or that a table lacks, is not considered.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pagebus.kernels.common.resources import Resources, table_text, take_resources
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.shapes import DenseConfig, pack, parse
from pagebus.kernels.linear.skinny_gemm import TileConfig

FOLDER = Path(__file__).with_name("resources")
COMPILED = (80, 90, 100, 120)
"""Capabilities with a table."""
COMPILED_FORMS = ("plain", "gated", "residual")
"""Forms whose kernels differ: the others are the plain one, to the compiler."""


class Variant(NamedTuple):
    """A kernel as compiled: of a form, for this width of tokens, of a launch shape with one split."""

    form: str
    tokens: int
    config: DenseConfig


def family_of(capability: int) -> int:
    """The capability whose table holds for a GPU: the newest that is not newer."""
    return max((known for known in COMPILED if known <= capability), default=COMPILED[0])


def variant_of(form: str, bucket: int, config: DenseConfig) -> Variant:
    """Which kernel runs."""
    form = form if form in COMPILED_FORMS else "plain"
    if isinstance(config, VectorConfig):
        return Variant(form, bucket, config)
    return Variant(form, config.tokens if isinstance(config, TileConfig) else 0, replace(config, splits=1))


@cache
def resources(capability: int) -> dict[Variant, Resources]:
    """What is known of the kernels for GPUs of this capability."""
    stored = json.loads((FOLDER / f"sm_{family_of(capability)}.json").read_text())
    return dict(map(_parse, stored["variants"]))


def table(capability: int, triton: str, found: dict[Variant, Resources]) -> str:
    """The text of a table, a line for each variant."""
    return table_text(capability, triton, (_packed(variant, found[variant]) for variant in sorted(found, key=repr)))


def _packed(variant: Variant, needs: Resources) -> dict[str, Any]:
    return {"form": variant.form, "width": variant.tokens, **pack(variant.config), **needs._asdict()}


def _parse(stored: dict[str, Any]) -> tuple[Variant, Resources]:
    fields = dict(stored)
    needs = take_resources(fields)
    form, width = fields.pop("form"), fields.pop("width")
    config = parse(fields)
    assert isinstance(config, DenseConfig)
    return Variant(form, width, config), needs
