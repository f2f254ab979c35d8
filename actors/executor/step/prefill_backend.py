"""Chooses the backend of long prompts' attention: the library, once it has plans for their shapes.

cuDNN plans each new shape, in some tens of milliseconds, and waits for the device to load its code. The first plan of a
kind takes 0.6 s on a machine that has just been started, and is part of the warm-up. cuDNN keeps plans per thread, so
the device thread itself makes them, one at a time, when no step has run for a while. Prompts of a shape without a plan
leave less to the library, or nothing, unless that would cost them more.
"""

from __future__ import annotations

import torch

from pagebus.actors.executor.memory.kv_cache import is_float8, layer_pages
from pagebus.actors.executor.step.runner import Runner
from pagebus.kernels.attention import hopper_prefill
from pagebus.kernels.attention.choice import AttentionPath
from pagebus.kernels.attention.cudnn_prefill import (
    PIECES,
    Batch,
    LongRow,
    Problem,
    batches,
    batches_of_every_shape,
    cudnn_attention,
    faster_parts,
    filled_parts,
    gain_s,
    problems,
)
from pagebus.kernels.attention.hopper_prefill import HeadShape
from pagebus.kernels.latent.expanded_plan import Sizes, rows_to_expand

PLAN_S = 0.06
"""Time of a plan: 35 to 65 ms were measured on an H200."""


class PrefillBackend:
    """Divides prompts between the library and our kernels, and prepares the library for missing shapes. It leaves the
    library nothing where it is not used. Device thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._always = runner.model.chooser.setup.backend == "torch"
        config = runner.model.config
        own = runner.model.chooser.long_prompts is AttentionPath.HOPPER_PREFILL
        self._own = own and not config.in_one_step  # an encoder has an attention of its own
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, config.layer_windows)
        self._sizes = latent_sizes(runner)
        self._batches = _batches(runner)
        self._used = len(self._batches) > 0
        self._planned: set[Problem] = set()
        self._lost_s: dict[Problem, float] = {}
        self.plan_s = 0.0
        """Cost of a plan to waiting requests, in seconds; there are none until the engine is ready."""

    def __len__(self) -> int:
        return len(self._batches)

    def spare(self, plan_s: float) -> None:
        """Requests wait for plans from now on, for so many seconds each."""
        self.plan_s = plan_s

    def parts(self, rows: tuple[LongRow, ...], decodes: bool) -> tuple[LongRow, ...]:
        """The parts of prompts that another backend than the default attends.

        Of latents: the rows that are expanded. With our kernel for long prompts: those that it takes. Otherwise: the
        parts that the library computes faster.
        These fill the smallest pieces. If the step's rows, or ``decodes`` beside them, would wait longer for missing
        plans than the parts save, they fill the smallest pieces that have plans.

        The time lost in that way adds up; once it exceeds the cost of the plans, they are made.
        """
        if self._sizes is not None:
            return rows_to_expand(rows, self._sizes)
        if self._own:
            return hopper_prefill.faster_rows(rows, self._heads)
        if not self._used:
            return ()
        if self._always:
            return filled_parts(rows, PIECES[0])
        wanted = self._faster(rows, PIECES[0])
        missing = problems(wanted) - self._planned
        if not missing:
            return wanted
        others = (self._faster(rows, piece) for piece in PIECES[1:])
        ready = next((parts for parts in others if problems(parts) <= self._planned), ())
        lost_s = self._saved_s(wanted) - self._saved_s(ready) + sum(self._lost_s.get(each, 0.0) for each in missing)
        if decodes or lost_s < len(missing) * self.plan_s:
            self._lost_s.update((each, lost_s / len(missing)) for each in missing)
            self._batches.sort(key=lambda batch: len(missing - problems(batch)))
            return ready
        self._planned |= missing
        return wanted

    def prepare_next(self) -> None:
        """Run attention on one batch, over any content of the cache, between two steps."""
        self._batches = [batch for batch in self._batches if not problems(batch) <= self._planned]
        if not self._batches:
            return
        batch = self._batches.pop(0)
        try:
            self._attend(batch)
            self._planned |= problems(batch)
        except torch.OutOfMemoryError:
            self._batches.clear()  # such prompts may never come

    def _faster(self, rows: tuple[LongRow, ...], piece: int) -> tuple[LongRow, ...]:
        config = self._runner.model.config
        return faster_parts(rows, piece, config.num_heads, config.head_dim)

    def _saved_s(self, parts: tuple[LongRow, ...]) -> float:
        """Seconds that the library saves in all layers of a step."""
        config = self._runner.model.config
        per_layer_s = sum(gain_s(batch, config.num_heads, config.head_dim) for batch in batches(parts))
        return per_layer_s * config.num_layers

    def _attend(self, rows: Batch) -> None:
        cache, config = self._runner.kv_cache, self._runner.model.config
        q, keys, values = _projected(self._runner, sum(row.num_queries for row in rows))
        k_cache, v_cache, scales = layer_pages(cache, 0, config)
        if is_float8(cache.dtype):
            scales = torch.ones(2, config.num_kv_heads, device=cache.device)
        slots = torch.zeros(len(rows), dtype=torch.int32, device=cache.device)
        tables, out = self._runner.state.block_tables, torch.empty_like(q)
        cudnn_attention(q, k_cache, v_cache, out, slots, tables, config.head_dim**-0.5, rows, scales, (keys, values))


def latent_sizes(runner: Runner) -> Sizes | None:
    """What rows to expand are chosen by; None: the engine expands none."""
    model = runner.model
    mixer = model.config.latent
    if mixer is None or model.chooser.long_prompts is not AttentionPath.EXPANDED_PREFILL:
        return None
    size = model.parameters.dtype.itemsize
    return Sizes(mixer.heads, mixer.nope_dim, mixer.rope_dim, mixer.v_head_dim, mixer.kv_rank, size)


def _batches(runner: Runner) -> list[Batch]:
    if runner.model.config.in_one_step or runner.model.chooser.long_prompts is not AttentionPath.CUDNN_PREFILL:
        return []
    config, limits = runner.model.config, runner.limits
    found = batches_of_every_shape(limits.max_num_batched_tokens, limits.max_model_len)
    always = runner.model.chooser.setup.backend == "torch"
    return [rows for rows in found if always or gain_s(rows, config.num_heads, config.head_dim) > 0]


def _projected(runner: Runner, count: int) -> tuple[torch.Tensor, ...]:
    """Queries [count, Hq, D], keys and values [count, Hkv, D] in one tensor as in a pass: cuDNN's plans depend on
    strides."""
    config, dtype = runner.model.config, runner.model.parameters.dtype
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    qkv = torch.zeros((count, sum(heads), config.head_dim), dtype=dtype, device=runner.kv_cache.device)
    return qkv.split_with_sizes(heads, dim=1)
