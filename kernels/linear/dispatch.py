"""Chooses the kernel of a product by its tokens and weights: as measured where it was, else by the cost model.

What was measured is in tables: a user's, from ``pagebus tune``, come before those that are shipped. Nothing is timed
while serving. The wrappers in `pagebus.kernels.linear.linear`, an engine's metrics and ``pagebus explain`` all use
:func:`choose_product` and :func:`choose_residual_product`.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import torch

from pagebus.kernels.common.machines import machine_of
from pagebus.kernels.common.target import HOPPER, Target, target_of
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.common.user_tables import until_tables_change, user_folder
from pagebus.kernels.linear.candidates import gates_by_rule, parts_by_rule
from pagebus.kernels.linear.costs import CostModel, Estimate
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.shapes import (
    BUCKETS,
    PROMPT_BUCKETS,
    PROMPTS,
    Config,
    LinearKernel,
    Product,
    kernel_of,
    tokens_class,
    whole,
)
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.linear.tables import Table, load_table, load_user_table, table_path
from pagebus.kernels.specialized.hopper_few import FewConfig
from pagebus.kernels.specialized.hopper_prompts import PromptConfig

MARGIN, MARGIN_ELSEWHERE = 0.97, 0.9
"""The library keeps its place unless the cost model's best is below this share of it: on a GPU that the model was
fitted to, and on others."""

MOST_OF_RESIDUALS = 16
"""Tokens of which the cost model lets a product do half of the next norm, at most: the product behind it then has to be
ours as well, which estimates do not count. Of more tokens, measured gains were rare."""
FEWEST_ROWS_OF_PROMPTS = 16384
"""Rows of the smallest gate and up, about, of which prompts were measured."""
FEWEST_OF_TILES, SOME = 4, 8
"""Tokens of which most candidates are tiles, and how many of the best are looked at for one."""


class Source(StrEnum):
    """Where a choice comes from."""

    USER = "user table"
    MEASURED = "measured table"
    MODEL = "cost model"
    RULE = "rule"


class LinearChoice(NamedTuple):
    """The choice for one product: ``config`` is the launch shape of our own kernel, None for the library.

    ``form`` is what becomes of it: a form of a `Product`, or "added" for a product that the library adds to the
    residual. ``estimate`` has the cost model's times, which need not have decided. ``product``: what was asked for.
    """

    kernel: LinearKernel
    form: str
    config: Config | None
    why: str
    source: Source = Source.RULE
    product: Product | None = None
    estimate: Estimate | None = None


class _Decision(NamedTuple):
    config: Config | None
    source: Source
    why: str


@until_tables_change
def user_table(target: Target) -> Table:
    """What the user has measured on such a GPU."""
    folder = user_folder()
    return {} if folder is None else load_user_table(target, folder)


@until_tables_change
def model_of(target: Target) -> CostModel:
    """The cost model of a kind of GPU."""
    return CostModel(machine_of(target))


def choose(form: str, x: torch.Tensor, weight: torch.Tensor) -> Config | None:
    """The launch shape of our own kernel for x [T, K] times weight [N, K]; None: the library is faster."""
    return choose_product(form, len(x), len(weight), weight.shape[1], x.dtype, target_of(x.device)).config


def choose_product(
    form: str,
    num_tokens: int,
    num_rows: int,
    num_inputs: int,
    dtype: torch.dtype,
    target: Target | None,
    *,
    half_normed: bool = False,
) -> LinearChoice:
    """The kernel for x [T, K] times weight [N, K]; ``half_normed``: x is the half of a norm, see `HalfNorm`."""
    return _product(form, num_rows, num_inputs, tokens_class(num_tokens), dtype, target, half_normed)


def choose_residual_product(
    num_tokens: int,
    num_rows: int,
    num_inputs: int,
    dtype: torch.dtype,
    target: Target | None,
    *,
    biased: bool = False,
    adds: bool = True,
    norms: bool = True,
) -> LinearChoice:
    """The same for a product into the residual: whether it ``adds`` itself and, with ``norms``, computes half of the
    following norm, if these are allowed."""
    return _residual_product(
        num_rows, num_inputs, tokens_class(num_tokens), dtype, target, biased, adds, adds and norms
    )


def choose_invariant_product(form: str, num_tokens: int, dtype: torch.dtype) -> LinearChoice:
    """The same with ``--deterministic``, on any GPU."""
    config = invariant_config(num_tokens, dtype)
    return LinearChoice(kernel_of(config), form, config, "--deterministic: one order of sums for any number of tokens")


@until_tables_change
def _product(
    form: str, num_rows: int, num_inputs: int, tokens: int, dtype: torch.dtype, target: Target | None, half_normed: bool
) -> LinearChoice:
    product = Product(form, num_rows, num_inputs)
    if target is None:
        return LinearChoice(LinearKernel.TORCH, form, None, "a CPU", product=product)
    config, source, why = _decide(product, tokens, dtype, target)
    estimate = None
    if 0 < tokens <= BUCKETS[-1] and dtype.itemsize == 2:
        estimate = model_of(target).best(form, num_rows, num_inputs, tokens)
    if half_normed and not _completes(config, source):
        config = _completing(product, tokens, dtype, target)
        why, source = "completes a norm, which the fastest cannot, or not as fast", Source.RULE
    kernel = LinearKernel.CUBLAS if config is None else kernel_of(config)
    return LinearChoice(kernel, form, config, why, source, product, estimate)


def _completes(config: Config | None, source: Source) -> bool:
    """Whether a norm is left to this launch shape: warps that only load complete none. Programs of vectors are so short
    that each loses a third of its time with the norm's sums, which estimates do not show. Measured ones may be faster
    all the same."""
    if isinstance(config, VectorConfig):
        return source is not Source.MODEL
    return isinstance(config, TileConfig)


def _completing(product: Product, tokens: int, dtype: torch.dtype, target: Target) -> Config:
    """The tiles that should be fastest, for this many tokens or the fewest that have some."""
    if 0 < tokens <= BUCKETS[-1] and dtype.itemsize == 2 and _is_aligned(product.inputs):
        bucket = max(tokens, FEWEST_OF_TILES)
        for _, config in model_of(target).ranked(product.form, product.rows, product.inputs, bucket, SOME):
            if isinstance(config, TileConfig):
                return config
    return invariant_config(tokens, dtype)


@until_tables_change
def _residual_product(
    num_rows: int, num_inputs: int, tokens: int, dtype: torch.dtype, target: Target | None, biased: bool, adds: bool,
    norms: bool,
) -> LinearChoice:  # fmt: skip
    if norms:
        begun = _product("residual", num_rows, num_inputs, tokens, dtype, target, False)
        if begun.config is not None:
            return begun
    chosen = _product("partial", num_rows, num_inputs, tokens, dtype, target, False)
    if chosen.config is None and not biased and adds and target and tokens > BUCKETS[-1] and dtype.itemsize == 2:
        return chosen._replace(form="added")
    if chosen.config is None or isinstance(chosen.config, VectorConfig | FewConfig) or chosen.config.splits == 1:
        return chosen._replace(form="plain")
    return _with_config(chosen._replace(form="plain"), whole(chosen.config)) if biased else chosen


def _with_config(chosen: LinearChoice, config: Config | None) -> LinearChoice:
    """The same with this launch shape; None: the library."""
    return chosen._replace(config=config, kernel=LinearKernel.CUBLAS if config is None else kernel_of(config))


def _decide(product: Product, tokens: int, dtype: torch.dtype, target: Target) -> _Decision:
    """Our own kernel's launch shape, if it is faster, and why it is chosen or not."""
    prompts = tokens >= PROMPTS and product.form == "gated"
    if not 0 < tokens <= BUCKETS[-1] and not prompts:
        return _library(f"more than {BUCKETS[-1]} tokens" if tokens else "no tokens")
    if dtype.itemsize != 2:
        return _library("not in 16 bits")
    if product.form == "residual" and dtype != torch.bfloat16:
        return _library("before it is divided, it may be too large for float16")
    if not _is_aligned(product.inputs):
        return _library("rows of the weights begin at odd addresses")
    if not _is_aligned(product.rows):
        return _library("rows of the result begin at odd addresses")
    found = measured(product, tokens, target)
    if found is not None:
        config, source = found
        return _Decision(config, source, f"{source}: {'the library was' if config is None else 'this was'} fastest")
    if prompts:
        return _of_prompts(product, tokens, target)
    return _by_rule(product, tokens, target) or _modelled(product, tokens, target)


def _by_rule(product: Product, tokens: int, target: Target) -> _Decision | None:
    """What was faster on an H200 than the cost model says, at all or nearly all sizes that were measured."""
    if target.capability != HOPPER or not model_of(target).machine.measured:
        return None
    if (parts := parts_by_rule(product, tokens)) is not None:
        return _Decision(parts, Source.RULE, "few rows and many inputs: parts were faster at nearly all sizes measured")
    if (tiles := gates_by_rule(product, tokens, target.num_multiprocessors)) is not None:
        return _Decision(tiles, Source.RULE, "gates whose tiles fill their rounds: faster at all sizes measured")
    return None


def _of_prompts(product: Product, tokens: int, target: Target) -> _Decision:
    """Gate and up of steps full of prompts that no table has: with the most tokens ours was faster at all twelve sizes
    that were measured, with fewer at some."""
    config, most = PromptConfig(), PROMPT_BUCKETS[-1]
    is_known = target.capability == HOPPER and model_of(target).machine.measured
    if is_known and tokens == most and product.rows >= FEWEST_ROWS_OF_PROMPTS and config.fits(product.inputs):
        return _Decision(config, Source.RULE, f"{most} and more tokens: this was faster at all sizes measured")
    return _library(f"{PROMPTS} and more tokens, not measured")


def measured(product: Product, tokens: int, target: Target) -> tuple[Config | None, Source] | None:
    """The launch shape that tables have (None: the library), and which of them; None: it was not measured."""
    for table, source in ((user_table(target), Source.USER), (load_table(table_path(target)), Source.MEASURED)):
        for bucket in (tokens, PROMPTS) if tokens > PROMPTS else (tokens,):
            if product in table and bucket in table[product]:
                return table[product][bucket], source
    return None


def _is_aligned(size: int) -> bool:
    """Whether rows of this many 16-bit numbers all begin at multiples of 16 bytes."""
    return size % 8 == 0


def _library(why: str) -> _Decision:
    return _Decision(None, Source.RULE, why)


def _modelled(product: Product, tokens: int, target: Target) -> _Decision:
    """As the cost model says. Half of a norm is only begun if that beats the product without, whoever computes it."""
    model, source = model_of(target), Source.MODEL
    if product.form == "residual" and tokens > MOST_OF_RESIDUALS:
        return _Decision(None, source, f"{source}: not for more than {MOST_OF_RESIDUALS} tokens")
    estimate = model.best(product.form, product.rows, product.inputs, tokens)
    margin = MARGIN if model.machine.measured else MARGIN_ELSEWHERE
    # For one token the library was slower at 14 of 15 products on a measured GPU, which estimates do not show.
    others = math.inf if tokens == 1 and model.machine.measured else estimate.library
    if product.form == "residual":
        others = min(others, model.best("partial", product.rows, product.inputs, tokens).us)
    if estimate.config is None or estimate.us >= margin * others:
        why = f"{source}: the library should take {estimate.library:.1f} µs, ours {estimate.us:.1f}"
        return _Decision(None, source, why)
    return _Decision(
        estimate.config, source, f"{source}: should take {estimate.us:.1f} µs, the library {estimate.library:.1f}"
    )


def invariant_config(num_tokens: int, dtype: torch.dtype) -> TileConfig:
    """A launch shape with which a token's result is the same for any number of tokens: only the tiles' width differs,
    and how much of K is loaded at a time.

    Each element of a tile is one chain of sums along all of K. Tiles of 64 rows and more take the same matrix
    instructions (wgmma) whatever their width; on other GPUs, and in float32, so do all tiles.
    """
    tokens = min(128, max(16, next_power_of_2(num_tokens)))
    if dtype.itemsize > 2:
        return TileConfig(128 if tokens == 128 else 64, tokens, 32, 2, 8)
    return TileConfig(128, 128, 64, 4, 8) if tokens == 128 else TileConfig(64, tokens, 128, 4, 4)
