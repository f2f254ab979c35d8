"""What ``pagebus tune`` asks of products with quantized weights (dense: `pagebus.kernels.linear.tuning`)."""

from __future__ import annotations

import torch

from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.shapes import Config, Product
from pagebus.kernels.linear.tuning.tune import DENSE, Sort
from pagebus.kernels.quantized.candidates import menu
from pagebus.kernels.quantized.choice import choose_quantized, costs_of
from pagebus.kernels.quantized.coding import Kind
from pagebus.kernels.quantized.tuning.timing import QuantizedBench, QuantizedJob


def candidates_for(product: Product, bucket: int, target: Target, count: int) -> list[Config]:
    """The ``count`` launch shapes that the cost model finds best; of layouts that it does not know, the first that are
    considered at all."""
    kind = Kind.parse(product.layout)
    ranked = [config for _, config in costs_of(target).ranked(product, bucket, kind, count)]
    return ranked or [*menu(bucket, kind)[:count]]


def chosen_for(product: Product, bucket: int, target: Target) -> Config | None:
    """What is chosen now; None: the library."""
    kind = Kind.parse(product.layout)
    given = product.form, bucket, product.rows, product.inputs
    return choose_quantized(*given, kind, torch.bfloat16, target).config


QUANTIZED = Sort(candidates_for, chosen_for, QuantizedJob, QuantizedBench)


def sort_of(product: Product) -> Sort:
    """How such a product is tuned."""
    return QUANTIZED if product.layout else DENSE
