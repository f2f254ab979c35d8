"""Chooses what multiplies by a quantized weight, by tokens, sizes and layout: as measured where it was, else by a rule.

The rule for 8 bits is `pagebus.kernels.quantized.byte_choice`. For codes of 4 bits, until times on GPUs say better:

- up to 64 tokens take one tile of tokens, as wide as their bucket. Up to 32, it is for two warps: too few for Hopper's
  own instructions, whose operands take more instructions to arrange;
- such tiles have 64 rows, or 32 where 64 would give the GPU fewer than two programs for each multiprocessor, and where
  registers would not suffice. K is cut as far as programs are lacking;
- more tokens take tiles of 128 by 128 on Hopper, and of 64 by 64 where registers would not suffice;
- products into the residual of up to 16 tokens do half of the next norm, as they do in 16 bits;
- above 256 tokens, weights are dequantized into a scratch for the library's product of 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from pagebus.kernels.coded.weights import Code
from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.dispatch import LinearChoice, Source, measured
from pagebus.kernels.linear.shapes import BUCKETS, SPLIT_FORMS, Config, LinearKernel, Product, kernel_of, tokens_class
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.quantized.byte_choice import HOPPER, choose_of_bytes
from pagebus.kernels.quantized.coding import Kind

MOST_OF_RESIDUALS = 16
LEAST_OF_E4M3 = 89
"""The compute capability from which on float8 is multiplied."""
OTHER = "other"
"""How a layout is called that no kernel reads."""
PROGRAMS, LEAST_PART = 2, 1024
"""For each multiprocessor, from which tiles are not made smaller; and columns of a part of K, at least."""


def choose_quantized(
    form: str, num_tokens: int, num_rows: int, num_inputs: int, kind: Kind | None, dtype: torch.dtype,
    target: Target | None, *, half_normed: bool = False,
) -> LinearChoice:  # fmt: skip
    """The kernel for x [T, K] times a quantized weight [N, K] of this kind (None: no kernel reads it)."""
    return _choose(form, num_rows, num_inputs, tokens_class(num_tokens), kind, dtype, target, half_normed)


def choose_quantized_residual(
    num_tokens: int, num_rows: int, num_inputs: int, kind: Kind | None, dtype: torch.dtype, target: Target | None, *,
    biased: bool = False, norms: bool = True,
) -> LinearChoice:  # fmt: skip
    """The same for a product into the residual, which with ``norms`` may do half of the following norm."""
    if norms and num_tokens <= MOST_OF_RESIDUALS and dtype == torch.bfloat16:
        begun = choose_quantized("residual", num_tokens, num_rows, num_inputs, kind, dtype, target)
        if begun.config is not None:
            return begun
    form = "plain" if biased else "partial"
    chosen = choose_quantized(form, num_tokens, num_rows, num_inputs, kind, dtype, target)
    cut = isinstance(chosen.config, TileConfig) and chosen.config.splits > 1
    return chosen if cut else chosen._replace(form="plain")


def choose_quantized_invariant(
    form: str, num_tokens: int, kind: Kind | None, dtype: torch.dtype, target: Target | None
) -> LinearChoice:
    """The same with ``--deterministic``."""
    why = "--deterministic: one order of sums for any number of tokens"
    if target is None:
        return LinearChoice(LinearKernel.TORCH, form, None, "a CPU")
    if kind is None or dtype.itemsize > 2:
        return LinearChoice(LinearKernel.DEQUANTIZED, form, None, why)
    return LinearChoice(LinearKernel.SKINNY_GEMM, form, invariant_config(num_tokens, kind), why)


def invariant_config(num_tokens: int, kind: Kind) -> TileConfig:
    """A launch shape with which a token's result is the same for any number of tokens: only the width of tiles
    differs."""
    tokens = next(width for width in (16, 32, 64) if num_tokens <= width or width == 64)
    return TileConfig(64, tokens, kind.depth, 3, 4)


@cache
def _choose(
    form: str, num_rows: int, num_inputs: int, tokens: int, kind: Kind | None, dtype: torch.dtype,
    target: Target | None, half_normed: bool,
) -> LinearChoice:  # fmt: skip
    product = Product(form, num_rows, num_inputs, OTHER if kind is None else kind.name)
    if target is None:
        return LinearChoice(LinearKernel.TORCH, form, None, "a CPU", product=product)
    library, why = _library(product, kind, dtype, target)
    if kind is None or dtype.itemsize > 2 or not 0 < tokens <= BUCKETS[-1]:
        return LinearChoice(library, form, None, why, product=product)
    found = measured(product, tokens, target)
    if found is not None:
        config, source = found
        why = f"{source}: {'the library was' if config is None else 'this was'} fastest"
    else:
        rounded = library is not LinearKernel.DEQUANTIZED
        config, source = _rule(product, tokens, kind, target, rounded=rounded), Source.RULE
        why = why if config is None else _why(config)
    if half_normed and config is None:
        config, source, why = _rule(product, tokens, kind, target), Source.RULE, "completes a norm"
    return LinearChoice(library if config is None else kernel_of(config), form, config, why, source, product)


def _library(product: Product, kind: Kind | None, dtype: torch.dtype, target: Target) -> tuple[LinearKernel, str]:
    """What multiplies many tokens, and why."""
    if kind is None:
        return LinearKernel.DEQUANTIZED, "no kernel reads this layout"
    if dtype.itemsize > 2:
        return LinearKernel.DEQUANTIZED, "not in 16 bits"
    if product.form == "wide":
        return LinearKernel.DEQUANTIZED, "the result is wanted in float32"
    aligned = product.rows % 16 == 0 and product.inputs % 16 == 0
    if not kind.rounded or not aligned:
        return LinearKernel.DEQUANTIZED, "activations stay as they are" if aligned else "odd sizes"
    if kind.code == Code.INT8:
        return LinearKernel.INT_MM, "activations are rounded to int8"
    if target.capability < LEAST_OF_E4M3 or dtype != torch.bfloat16:
        return LinearKernel.DEQUANTIZED, "the library's float8 needs bfloat16 and a newer GPU"
    return LinearKernel.SCALED_MM, "activations are rounded to float8"


def _why(config: Config) -> str:
    rule = "a rule: quantized weights have no cost model yet"
    return f"{rule}; tokens are rounded to 8 bits" if isinstance(config, TileConfig) and config.rounded else rule


def _rule(product: Product, tokens: int, kind: Kind, target: Target, *, rounded: bool = False) -> Config | None:
    if not kind.code.in_words:
        return choose_of_bytes(product, tokens, kind, target, rounded=rounded)
    return _rule_of_words(product, tokens, kind, target)


def _rule_of_words(product: Product, tokens: int, kind: Kind, target: Target) -> TileConfig:
    width, depth, small = max(16, tokens), kind.depth, kind.small
    if width > 64 and not small and target.capability == HOPPER:
        return TileConfig(128, 128, depth, 3, 8)
    if width >= 64:
        return TileConfig(64, 64, depth, 2 if target.small_memory else 3, 4)
    split, least = product.form in SPLIT_FORMS, PROGRAMS * target.num_multiprocessors
    short = split or width == 32 or product.rows < 64 * least
    config = TileConfig(32 if short else 64, width, depth, 4, 2)
    return _cut(config, product, least) if split else config


def _cut(config: TileConfig, product: Product, least: int) -> TileConfig:
    """With K in as many parts as the GPU needs to be busy."""
    for splits in (8, 4, 2):
        cut = replace(config, splits=splits)
        enough = product.inputs // splits >= LEAST_PART and cut.tiles(product.rows) * splits <= 2 * least
        if enough and cut.fits(product.inputs):
            return cut
    return config
