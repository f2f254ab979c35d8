"""Attention of long prompts: by the library once it is ready for their shapes, which it is made in idle moments.

cuDNN plans each new shape, in some tens of milliseconds, and waits for the device to load what it needs; the first of a
kind takes 0.6 s on a machine that has just been started, and is part of the warm-up. It keeps its plans by thread. So
the device thread itself makes them, one at a time, when no step has run for a while. Prompts of a shape that it has not
come to take our own kernel, unless that would cost them more.
"""

from __future__ import annotations

import torch

from actors.executor.kv_cache import is_float8
from actors.executor.runner import Runner
from actors.settings import Settings
from kernels.attention_library import (
    Batch,
    LongRow,
    Problem,
    batches_of_every_shape,
    gain_s,
    is_faster,
    long_prefill,
    problems,
    supports,
)

PLAN_S = 0.06
"""What a plan takes: 46 to 65 ms were measured on an H200."""


class LongPrompts:
    """Which prompts are left to the library, and the shapes that are still to be made ready for it; none where it is
    not used. Device thread."""

    def __init__(self, settings: Settings, runner: Runner) -> None:
        self._runner = runner
        self._batches = _batches(settings, runner)
        self._always = settings.attention_backend == "torch" or not self._batches
        self._planned: set[Problem] = set()
        self._lost_s: dict[Problem, float] = {}
        self.plan_s = 0.0
        """What a plan costs those who wait for it: nobody does, until the engine is ready."""

    def __len__(self) -> int:
        return len(self._batches)

    def take(self, rows: tuple[LongRow, ...]) -> bool:
        """Whether the attention of these rows, beside which nothing decodes, is left to whoever is the fastest. If not,
        it is for our own kernel: they would wait longer for plans that are missing than the library saves.

        What is lost in that way adds up: once it is more than the plans cost, they are made.
        """
        if self._always or (saved_s := self._saved_s(rows)) <= 0:
            return True
        missing = problems(rows) - self._planned
        lost_s = saved_s + sum(self._lost_s.get(each, 0.0) for each in missing)
        if missing and lost_s < len(missing) * self.plan_s:
            self._lost_s.update((each, lost_s / len(missing)) for each in missing)
            self._batches.sort(key=lambda batch: len(missing - problems(batch)))
            return False
        self._planned |= missing
        return True

    def prepare_next(self) -> None:
        """Attend one batch, over whatever the cache holds. Between two steps."""
        self._batches = [batch for batch in self._batches if not problems(batch) <= self._planned]
        if not self._batches:
            return
        batch = self._batches.pop(0)
        try:
            self._attend(batch)
            self._planned |= problems(batch)
        except torch.OutOfMemoryError:
            self._batches.clear()  # such prompts may never come

    def _saved_s(self, rows: tuple[LongRow, ...]) -> float:
        """Seconds that the library saves in all layers of a step."""
        config = self._runner.model.config
        per_layer_s: float = gain_s(rows, config.num_heads, config.head_dim)
        return per_layer_s * config.layer_windows.count(0)

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
