"""A user's tables of measured launch shapes: where they are, and which of them choices depend on.

Does not import torch. ``pagebus tune`` writes them, one for dense products, one for experts, and one for decode
attention. Their names have the GPU's capability, multiprocessors and bandwidth, Triton's version and a digest of the
kernels' sources: one that another version wrote is not even looked at. Choices are cached until tables change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ParamSpec, TypeVar

from pagebus.kernels.common.target import Target

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Tuned(StrEnum):
    """What has a table of its own."""

    PRODUCTS = "products"
    EXPERTS = "experts"
    ATTENTION = "attention"


SOURCES = {
    Tuned.PRODUCTS: (
        "linear/gemv.py", "linear/skinny_gemm.py", "linear/epilogue.py", "linear/activation.py",
        "linear/library_parts.py", "specialized/hopper_gemm.py", "specialized/hopper_words.py",
        "specialized/hopper_widening.py", "specialized/hopper_word_loads.py", "specialized/hopper_few.py",
        "specialized/hopper_ring.py", "specialized/hopper_fragments.py", "specialized/hopper_prompts.py",
        "specialized/split_sums.py", "layers/norm.py", "common/int8.py", "common/pdl.py", "coded/tiles.py",
        "coded/loads.py", "coded/products.py", "coded/word_tiles.py", "coded/vectors.py", "coded/unpack.py",
        "coded/scales.py", "coded/rounding.py", "coded/rounded_tiles.py", "coded/quads.py", "coded/low_words.py",
        "coded/word_values.py", "cublas/plan.py", "cublas/product.py", "cublas/tiles.py",
    ),
    Tuned.EXPERTS: (
        "moe/pairs.py", "moe/grouped.py", "moe/hopper_experts.py", "moe/sorting.py", "moe/activation.py",
        "moe/experts.py", "moe/launch/shapes.py", "moe/launch/rule.py", "moe/launch/candidates.py",
        "linear/epilogue.py", "linear/activation.py", "specialized/hopper_gemm.py", "coded/rounding.py",
        "common/int8.py", "common/pdl.py",
    ),
    Tuned.ATTENTION: (
        "attention/decode_plan.py", "attention/decode.py", "attention/fused_decode.py", "attention/merge.py",
        "attention/addresses.py", "attention/rotary_attention.py", "attention/forms/launch.py",
        "layers/rotary_kv_write.py", "common/int8.py", "common/float8.py", "common/reach.py", "common/pdl.py",
    ),
}  # fmt: skip
"""The sources that decide how long a product takes, with the norm beside it, and how long experts and decodes do."""

_folder: Path | None = None
_forget: list[Callable[[], None]] = []


def home_folder() -> Path:
    """Where a user's tables are unless another folder is named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pagebus", "launch-shapes")


def user_path(target: Target, folder: Path, tuned: Tuned = Tuned.PRODUCTS) -> Path:
    """The path of a user's table for a kind of GPU, these versions and these kernels."""
    digest = _sources_digest(Path(__file__).parents[1], tuned)
    kind = f"sm_{target.capability}_{target.num_multiprocessors}"
    if target.memory_gb_per_s:
        kind += f"_{target.memory_gb_per_s}GBs"
    prefix = "" if tuned is Tuned.PRODUCTS else f"{tuned}-"
    return folder / f"{prefix}{kind}-triton-{_triton_version()}-{digest}.json"


@cache
def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


@cache
def _sources_digest(folder: Path, tuned: Tuned) -> str:
    digest = hashlib.sha256()
    for name in SOURCES[tuned]:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:12]


def read_user_tables(folder: Path | None) -> None:
    """From now on, choose as the user's tables in ``folder`` say; None: there are none."""
    global _folder
    _folder = folder
    forget_choices()


def user_folder() -> Path | None:
    """Where the tables are that choices depend on."""
    return _folder


def until_tables_change(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`functools.cache`, until :func:`forget_choices`."""
    cached = cache(function)
    _forget.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


def forget_choices() -> None:
    """After tables have changed."""
    for forget in _forget:
        forget()
