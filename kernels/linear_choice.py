"""Which kernel multiplies how many tokens with which weights: measured for known GPUs, a rule of thumb for others.

The tables are made by `python -m kernels.tune_linear` and lie in `linear_tables/`, one file per GPU. Nothing is timed
while serving.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.linear_specialized import SpecializedConfig
from kernels.linear_tiles import TileConfig
from kernels.linear_vector import VectorConfig
from kernels.target import Target, target_of
from kernels.triton_import import next_power_of_2

Config = TileConfig | VectorConfig | SpecializedConfig

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""A choice holds for as many tokens and fewer, down to the bucket below. Above the last one the library always wins."""
FORMS = ("plain", "wide", "gated", "partial", "residual")
TABLES = Path(__file__).with_name("linear_tables")


def bucket_of(num_tokens: int) -> int:
    """The smallest bucket that holds ``num_tokens``."""
    return BUCKETS[bisect_left(BUCKETS, num_tokens)]


def choose(form: str, x: torch.Tensor, weight: torch.Tensor) -> Config | None:
    """The launch shape of our own kernel for x [T, K] times weight [N, K]; None: the library is faster."""
    target = target_of(x.device)
    if target is None or not 0 < len(x) <= BUCKETS[-1] or x.dtype.itemsize != 2:
        return None
    if form == "residual" and x.dtype != torch.bfloat16:  # before it is divided, it may be too large for float16
        return None
    return _choice(form, *weight.shape, bucket_of(len(x)), target)


def invariant_config(x: torch.Tensor, weight: torch.Tensor) -> TileConfig:
    """A launch shape with which a token's result is the same for any number of tokens: only the tiles' width differs,
    and how much of K is loaded at a time.

    Each element of a tile is one chain of sums along all of K. Tiles of 64 rows and more take the same matrix
    instructions (wgmma) whatever their width; on other GPUs, and in float32, so do all tiles.
    """
    tokens = min(128, max(16, next_power_of_2(len(x))))
    if x.dtype.itemsize > 2:
        return TileConfig(128 if tokens == 128 else 64, tokens, 32, 2, 8)
    return TileConfig(128, 128, 64, 4, 8) if tokens == 128 else TileConfig(64, tokens, 128, 4, 4)


@cache
def _choice(form: str, num_rows: int, num_inputs: int, bucket: int, target: Target) -> Config | None:
    if num_inputs % 8:  # rows that begin at odd addresses
        return None
    measured = load_table(table_path(target))
    if (form, num_rows, num_inputs) in measured:
        return measured[form, num_rows, num_inputs][bucket]
    return guess(form, num_rows, num_inputs, bucket, target)


def guess(form: str, num_rows: int, num_inputs: int, bucket: int, target: Target) -> TileConfig | None:
    """For a shape that was not measured: tiles as did well for others on an H200, if they keep all processors busy."""
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
    """Where the choices for a kind of GPU are."""
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
