"""Times products with quantized weights on the GPU at hand, as `pagebus.kernels.linear.tuning.timing` times dense ones.

Weights have random numbers in a layout of their kind, more than the L2 cache holds; the norm beside the product, and an
activation behind the library's, are timed with it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from pagebus.kernels.coded.weights import Code
from pagebus.kernels.common.target import target_of
from pagebus.kernels.layers.norm import NextNorm, add_rms_norm, rms_norm
from pagebus.kernels.linear.activation import silu_mul
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.linear import gated_linear, linear, partial_linear, residual_linear
from pagebus.kernels.linear.shapes import BUCKETS, Config, Product
from pagebus.kernels.linear.tuning.timing import LEAST_LAUNCHES, ROTATED_BYTES, graph_microseconds
from pagebus.kernels.quantized.choice import choose_quantized
from pagebus.kernels.quantized.coding import Kind, coded_of
from pagebus.kernels.quantized.layouts import Layout, W4Words, W8Blocks, W8Rows, num_bytes
from pagebus.kernels.quantized.library import library_product
from pagebus.kernels.quantized.values import E2M1
from pagebus.kernels.quantized.words import num_words

LARGEST = 100
"""Of random numbers of 8 bits: as float8 it is a number too."""
MANY = 5000
"""Tokens for which the library multiplies."""


def random_layout(kind: Kind, rows: int, columns: int, device: torch.device) -> Layout:
    """Random numbers [rows, columns] in a layout of this kind, with scales of about 1 / 100."""
    return _words(kind, rows, columns, device) if kind.code.in_words else _bytes(kind, rows, columns, device)


def _bytes(kind: Kind, rows: int, columns: int, device: torch.device) -> W8Rows | W8Blocks:
    numbers = torch.randint(-LARGEST, LARGEST + 1, (rows, columns), dtype=torch.int8, device=device)
    values = numbers if kind.code == Code.INT8 else numbers.float().to(torch.float8_e4m3fn)
    if not (kind.width or kind.zeros or kind.lows):
        return W8Rows(values, _scales(rows, device=device), kind.rounded)
    block = kind.height, kind.width or columns
    shape = -(-rows // block[0]), -(-columns // block[1])
    zero, low = (torch.zeros(shape, device=device) if there else None for there in (kind.zeros, kind.lows))
    return W8Blocks(values, _scales(*shape, device=device), block, zero, low, rounded=kind.rounded)


def _words(kind: Kind, rows: int, columns: int, device: torch.device) -> W4Words:
    words = torch.randint(-(2**31), 2**31, (rows, num_words(columns)), dtype=torch.int32, device=device)
    group = kind.width or columns
    scale, floats = _scales(-(-columns // group), rows, device=device), kind.code == Code.E2M1
    whole = None
    if floats and group == 32:  # MXFP4
        scale = torch.full_like(scale, 120, dtype=torch.uint8)
    elif floats:  # NVFP4
        scale, whole = scale.to(torch.float8_e4m3fn), torch.ones(rows, device=device)
    zero = torch.full(scale.shape, 8, dtype=torch.uint8, device=device) if kind.zeros else None
    low = torch.zeros(scale.shape, device=device) if kind.lows else None
    table = None if kind.code == Code.WORDS else torch.tensor(E2M1, device=device)
    return W4Words(words, scale, columns, group, zero, low, whole, table, e2m1=floats)


def _scales(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.rand(shape, device=device) / LARGEST + 0.001


class QuantizedBench:
    """Inputs and weights of one product."""

    def __init__(self, product: Product, rotated_bytes: int = ROTATED_BYTES) -> None:
        self.product, self.kind = product, Kind.parse(product.layout)
        device = torch.device("cuda", torch.cuda.current_device())
        one = random_layout(self.kind, product.rows, product.inputs, device)
        self._bytes = num_bytes(one)
        count = min(32, max(2, -(-rotated_bytes // self._bytes))) - 1
        self._weights = [one, *(random_layout(self.kind, product.rows, product.inputs, device) for _ in range(count))]
        width = product.rows if product.form in ("partial", "residual") else product.inputs
        self._x = torch.randn(BUCKETS[-1], product.inputs, device=device).bfloat16()
        self._residual = torch.zeros(BUCKETS[-1], width, device=device).bfloat16()
        self._norm = torch.ones(width, device=device).bfloat16()
        self._following = NextNorm(self._norm, 1e-5, torch.zeros(width, dtype=torch.int32, device=device))

    def step(self, config: Config | None, tokens: int, index: int) -> None:
        """The product and the norm beside it; None: the library."""
        x, residual, weight = self._x[:tokens], self._residual[:tokens], self._weights[index % len(self._weights)]
        coded = coded_of(weight)
        assert coded is not None
        if self.product.form == "residual" and config is not None:
            residual_linear(x, coded, None, residual, self._following, config)
        elif self.product.form in ("partial", "residual"):
            product = self._library(x, weight) if config is None else partial_linear(x, coded, config=config)
            assert isinstance(product, torch.Tensor)
            add_rms_norm(product, residual, self._norm, 1e-5)
        else:
            x = rms_norm(x, self._norm, 1e-5)
            if config is None:
                product = self._library(x, weight)
                _ = silu_mul(product) if self.product.form == "gated" else product
            else:
                (gated_linear if self.product.form == "gated" else linear)(x, coded, config=config)

    def _library(self, x: torch.Tensor, weight: Layout) -> torch.Tensor:
        product, target = self.product, target_of(x.device)
        choice = choose_quantized("plain", MANY, product.rows, product.inputs, self.kind, x.dtype, target)
        return library_product(choice.kernel, x, weight, None, None)

    def microseconds(self, config: Config | None, tokens: int) -> float:
        """Median time of a step, many of them captured in one graph.

        Raises:
            Exception: this GPU does not take the launch shape.
        """
        launches = max(LEAST_LAUNCHES, min(32, 4 * ROTATED_BYTES // self._bytes))
        return graph_microseconds([partial(self.step, config, tokens, index) for index in range(launches)])


class QuantizedJob(NamedTuple):
    """A launch shape to be compiled for ``bucket`` tokens; None: the library."""

    product: Product
    bucket: int
    config: Config | None

    @property
    def name(self) -> str:
        return f"{self.product.name} {self.config}"

    @property
    def kernel(self) -> tuple[object, ...] | None:
        """What decides which kernel is compiled; None: the library's."""
        if self.config is None:
            return None
        tokens = self.bucket if isinstance(self.config, VectorConfig) else 0
        return self.product, self.config, tokens

    def launch(self) -> None:
        """Once."""
        QuantizedBench(self.product, 0).step(self.config, self.bucket, 0)
