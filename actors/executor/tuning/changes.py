"""What tuning tries in a step: other launch shapes of one product or of the experts, or another form of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from pagebus.actors.executor.tuning.fitted import fitted
from pagebus.kernels.attention.forms.form import FORMS, DecodeHeads
from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.dispatch import FEWEST_OF_TILES
from pagebus.kernels.linear.shapes import Config, Product
from pagebus.kernels.moe.launch.shapes import Shape, buckets
from pagebus.kernels.moe.tune import considered
from pagebus.kernels.quantized.tuning.tune import sort_of

BEST = 8
"""Launch shapes of a product that are tried, of those that the cost model ranks."""

Tuned: TypeAlias = Product | Shape | DecodeHeads
Choices: TypeAlias = Mapping[Tuned, Any]
"""The launch shapes of products (None: the library) and of experts, and the form of attention, that are not
today's."""


class Change(NamedTuple):
    """``choices`` for the product, experts or heads of this ``name``; a product into the residual has them for two
    forms."""

    name: str
    choices: Choices


class Measurable(NamedTuple):
    """What of an engine may be measured: products, the experts of its layers if these are not quantized, and the heads
    of its decodes."""

    products: list[Product]
    experts: Shape | None
    heads: DecodeHeads | None


def changes(todo: Measurable, bucket: int, target: Target) -> list[list[Change]]:
    """All that are tried in a step of ``bucket`` tokens, by what they change: first what reads most."""
    found = []
    if todo.experts is not None and bucket in buckets(todo.experts):
        shape = todo.experts
        found.append([Change(f"experts {shape.name}", {shape: each}) for each in considered(shape, bucket, target)])
    known = set(todo.products)
    for product in sorted(todo.products, key=_order):
        if product.form != "residual":
            halved = product._replace(form="residual")
            found.append(_of_product(product, halved if halved in known else None, bucket, target))
    if todo.heads is not None:
        found.append([Change(todo.heads.name, {todo.heads: form}) for form in FORMS])
    return found


def _order(product: Product) -> tuple[bool, int]:
    """The head, of which there is one, behind the products of layers."""
    return product.form == "wide", -product.rows * product.inputs


def _of_product(product: Product, halved: Product | None, bucket: int, target: Target) -> list[Change]:
    """``halved``: the same product that does half of the next norm; without a launch shape of its own it does not."""
    without: dict[Tuned, Any] = {} if halved is None else {halved: None}
    found = [Change(product.name, {**without, product: config}) for config in _configs(product, bucket, target)]
    if halved is not None:
        ours = (config for config in _configs(halved, bucket, target) if config is not None)
        found = [*(Change(product.name, {halved: config}) for config in ours), *found]
    return found


def _configs(product: Product, bucket: int, target: Target) -> list[Config | None]:
    """The cost model's best, those that it does not know, and the library. Few tokens also take tiles: only these
    complete norms fast."""
    sort = sort_of(product)
    found: list[Config] = sort.candidates(product, bucket, target, BEST)
    if not product.layout:
        if bucket < FEWEST_OF_TILES:
            found = [*found, *sort.candidates(product, FEWEST_OF_TILES, target, BEST // 2)]
        found = [*found, *fitted(product, bucket, target)]
    return list(dict.fromkeys([*found, None]))
