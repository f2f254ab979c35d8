"""Launches of the kernel for long prompts, over heads of every padded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.hopper_prefill import hopper_attention

CASES = (  # query heads, KV heads, head dim, format, window, soft cap
    (32, 8, 128, torch.bfloat16, 0, 0.0), (32, 8, 128, torch.bfloat16, 4096, 0.0),
    (64, 8, 64, torch.float16, 128, 0.0), (32, 32, 96, torch.bfloat16, 0, 0.0),
    (16, 8, 256, torch.bfloat16, 0, 0.0), (16, 8, 256, torch.bfloat16, 1024, 50.0),
)  # fmt: skip


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def long_prompts() -> Iterator[tuple[str, Callable[[], None]]]:
    """A chunk behind a past, by name."""
    for case in CASES:
        q_heads, kv_heads, head_dim, dtype, window, softcap = case
        name = f"{q_heads}/{kv_heads} d{head_dim} long {dtype} window {window} softcap {softcap}"
        yield name, partial(_launch, *case)


def _launch(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int, softcap: float) -> None:
    cache = meta(1024, 2, 2, 16, kv_heads, head_dim, dtype=dtype)
    queries = meta(4096, q_heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :q_heads]
    hopper_attention(
        queries, cache[:, 1, 0], cache[:, 1, 1], meta(4096, q_heads, head_dim, dtype=dtype), meta(1), meta(64, 512),
        0.1, [LongRow(0, 0, 4096, 8192)], sliding_window=window, softcap=softcap,
    )  # fmt: skip
