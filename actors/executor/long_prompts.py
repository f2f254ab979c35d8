"""Attention of long prompts, made ready while an executor has nothing to do.

cuDNN plans each new shape, in some tens of milliseconds, and waits for the device to load what it needs; the first of a
kind took 0.6 s on a machine that had just been started. It keeps its plans by thread. So the device thread itself makes
them, one at a time, when no step has run for a while; one that it has not come to is made by the first such prompt.
"""

from __future__ import annotations

from collections import deque

import torch

from actors.executor.kv_cache import is_float8
from actors.executor.runner import Runner
from actors.settings import Settings
from kernels.attention_library import Batch, batches_of_every_shape, is_faster, long_prefill, supports


class LongPrompts:
    """The shapes that are still to be made ready; none where the library is not used."""

    def __init__(self, settings: Settings, runner: Runner) -> None:
        self._runner = runner
        self._batches = deque(_batches(settings, runner))

    def __len__(self) -> int:
        return len(self._batches)

    def prepare_next(self) -> None:
        """Attend one batch, over whatever the cache holds. Device thread, between two steps."""
        try:
            self._attend(self._batches.popleft())
        except torch.OutOfMemoryError:
            self._batches.clear()  # such prompts may never come

    def _attend(self, rows: Batch) -> None:
        cache, config = self._runner.kv_cache, self._runner.model.config
        q = _queries(self._runner, sum(row.num_queries for row in rows))
        k_cache, v_cache = cache.select(1, 0).unbind(1)
        ones = torch.ones(2, config.num_kv_heads, device=cache.device) if is_float8(cache.dtype) else None
        slots = torch.zeros(len(rows), dtype=torch.int32, device=cache.device)
        tables, out = self._runner.state.block_tables, torch.empty_like(q)
        long_prefill(q, k_cache, v_cache, out, slots, tables, config.head_dim**-0.5, rows, ones)


def _batches(settings: Settings, runner: Runner) -> list[Batch]:
    config, limits = runner.model.config, runner.limits
    never = settings.attention_backend == "triton" or settings.deterministic or 0 not in config.layer_windows
    if runner.kv_cache.device.type == "cpu" or never or not supports(_queries(runner, 1), runner.kv_cache, 0):
        return []
    found = batches_of_every_shape(limits.max_num_batched_tokens, limits.max_model_len)
    always = settings.attention_backend == "torch"
    return [rows for rows in found if always or is_faster(rows, config.num_heads, config.head_dim)]


def _queries(runner: Runner, count: int) -> torch.Tensor:
    """Queries [count, Hq, D], beside keys and values as in a pass: cuDNN plans for strides too."""
    config, dtype = runner.model.config, runner.model.parameters.dtype
    num_heads = config.num_heads + 2 * config.num_kv_heads
    qkv = torch.zeros((count, num_heads, config.head_dim), dtype=dtype, device=runner.kv_cache.device)
    return qkv[:, : config.num_heads]
