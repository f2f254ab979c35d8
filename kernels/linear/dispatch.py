"""Chooses the kernel of a product by its tokens and weights: measured for known GPUs, a rule of thumb for others.

The tables are made by `python -m pagebus.kernels.linear.tune` and lie in `tables/`, one file per GPU. Nothing is timed
while serving. The wrappers in `pagebus.kernels.linear.linear`, an engine's metrics and ``pagebus explain`` all use
:func:`choose_product` and :func:`choose_residual_product`.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from dataclasses import astuple, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pagebus.kernels.common.target import Target, target_of
from pagebus.kernels.common.triton import next_power_of_2
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.hopper_gemm import SpecializedConfig
from pagebus.kernels.linear.skinny_gemm import TileConfig

Config = TileConfig | VectorConfig | SpecializedConfig

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Buckets of token counts. A choice holds for its bucket's count and fewer, down to the next bucket. Above the last one
the library always wins."""
FORMS = ("plain", "wide", "gated", "partial", "residual")
TABLES = Path(__file__).with_name("tables")


def bucket_of(num_tokens: int) -> int:
    """The smallest bucket that holds ``num_tokens``."""
    return BUCKETS[bisect_left(BUCKETS, num_tokens)]


class LinearKernel(StrEnum):
    """The kernels that multiply."""

    GEMV = "gemv"
    SKINNY_GEMM = "skinny_gemm"
    HOPPER_GEMM = "hopper_gemm"
    CUBLAS = "cublas"
    TORCH = "torch"


KERNELS: dict[type[Config], LinearKernel] = {
    VectorConfig: LinearKernel.GEMV,
    TileConfig: LinearKernel.SKINNY_GEMM,
    SpecializedConfig: LinearKernel.HOPPER_GEMM,
}
"""The kernel of each type of launch shape."""
MANY = BUCKETS[-1] + 1
"""Stands for all token counts above the buckets."""


class LinearChoice(NamedTuple):
    """The choice for one product: ``config`` is the launch shape of our own kernel, None for the library.

    ``form`` is what becomes of it: one of `FORMS`, or "added" for a product that the library adds to the residual.
    """

    kernel: LinearKernel
    form: str
    config: Config | None
    why: str


def kernel_of(config: Config) -> LinearKernel:
    """Whose launch shape this is."""
    return KERNELS[type(config)]


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


def tokens_class(num_tokens: int) -> int:
    """A token count that stands for all counts with the same choices."""
    return bucket_of(num_tokens) if 0 < num_tokens <= BUCKETS[-1] else min(num_tokens, MANY)


@cache
def _product(
    form: str, num_rows: int, num_inputs: int, tokens: int, dtype: torch.dtype, target: Target | None, half_normed: bool
) -> LinearChoice:
    if target is None:
        return LinearChoice(LinearKernel.TORCH, form, None, "a CPU")
    config, why = _config(form, num_rows, num_inputs, tokens, dtype, target)
    if config is None and half_normed:
        config, why = invariant_config(tokens, dtype), "completes a norm, which the library cannot"
    return LinearChoice(LinearKernel.CUBLAS if config is None else kernel_of(config), form, config, why)


@cache
def _residual_product(
    num_rows: int, num_inputs: int, tokens: int, dtype: torch.dtype, target: Target | None, biased: bool, adds: bool,
    norms: bool,
) -> LinearChoice:  # fmt: skip
    if norms:
        begun = _product("residual", num_rows, num_inputs, tokens, dtype, target, False)
        if begun.config is not None:
            return begun
    chosen = _product("partial", num_rows, num_inputs, tokens, dtype, target, False)
    if chosen.config is None and not biased and adds and target and tokens == MANY and dtype.itemsize == 2:
        return chosen._replace(form="added")
    if chosen.config is None or isinstance(chosen.config, VectorConfig) or chosen.config.splits == 1:
        return chosen._replace(form="plain")
    return chosen._replace(form="plain", config=replace(chosen.config, splits=1)) if biased else chosen


def _config(
    form: str, num_rows: int, num_inputs: int, tokens: int, dtype: torch.dtype, target: Target
) -> tuple[Config | None, str]:
    """Our own kernel's launch shape, if it is faster, and why it is chosen or not."""
    if not 0 < tokens <= BUCKETS[-1]:
        return None, f"more than {BUCKETS[-1]} tokens" if tokens else "no tokens"
    if dtype.itemsize != 2:
        return None, "not in 16 bits"
    if form == "residual" and dtype != torch.bfloat16:
        return None, "before it is divided, it may be too large for float16"
    if num_inputs % 8:
        return None, "rows of the weights begin at odd addresses"
    measured = load_table(table_path(target)).get((form, num_rows, num_inputs))
    if measured is not None:
        config = measured[tokens]
        return config, f"measured: {'the library was' if config is None else 'this was'} fastest"
    config = guess(form, num_rows, num_inputs, tokens, target)
    return config, "a shape not measured: " + ("left to the library" if config is None else "tiles that fill the GPU")


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


def guess(form: str, num_rows: int, num_inputs: int, bucket: int, target: Target) -> TileConfig | None:
    """A guess for a shape that was not measured: tiles that did well for others on an H200, if they occupy all
    multiprocessors."""
    if bucket > 32 or target.capability != 90 or form == "residual":
        return None
    best, most = None, 0.45
    for splits, rows in itertools.product((1, 2, 4) if form == "partial" else (1,), (64, 48, 112)):
        waves = -(-num_rows // rows) * splits / target.num_multiprocessors
        busy = waves / math.ceil(waves)
        if busy > most and (waves <= 1 or busy > 0.9) and num_inputs % (splits * 128) == 0:
            best, most = TileConfig(rows, max(16, bucket), 128, 4, 4, splits), busy
    return best


def table_path(target: Target) -> Path:
    """The path of the table for a kind of GPU."""
    return TABLES / f"sm_{target.capability}_{target.num_multiprocessors}.json"


Table = dict[tuple[str, int, int], dict[int, Config | None]]
"""Choices by (form, N, K) and bucket."""


@cache
def load_table(path: Path) -> Table:
    """The measured choices; empty for a GPU that was not measured."""
    if not path.is_file():
        return {}
    return {
        (entry["form"], entry["rows"], entry["inputs"]): {
            int(bucket): _parse(stored) for bucket, stored in entry["buckets"].items()
        }
        for entry in json.loads(path.read_text())
    }


def merge_table(path: Path, form: str, num_rows: int, num_inputs: int, choices: dict[int, Config | None]) -> None:
    """Put the choices for one product into the table at ``path``, one line for each product; its others stay."""
    table, product = load_table(path), (form, num_rows, num_inputs)
    table = {**table, product: {**table.get(product, {}), **choices}}
    lines = [
        json.dumps({"form": f, "rows": n, "inputs": k, "buckets": {bucket: _pack(c) for bucket, c in chosen.items()}})
        for (f, n, k), chosen in sorted(table.items())
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    load_table.cache_clear()


def _pack(config: Config | None) -> list[Any] | None:
    """``["TileConfig", rows, tokens, ...]``; None, the library, is null."""
    return None if config is None else [type(config).__name__, *astuple(config)]


def _parse(stored: list[Any] | None) -> Config | None:
    if stored is None:
        return None
    name, *numbers = stored
    return {kind.__name__: kind for kind in (TileConfig, VectorConfig, SpecializedConfig)}[name](*numbers)
