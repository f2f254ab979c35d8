"""Dry run: an engine's warm-up on tensors without memory, which launches every kernel but computes nothing.

Launches depend on the settings, the model and the GPU (:mod:`pagebus.kernels.common.target`), never on values, so
shapes suffice. A listener to Triton's launches thereby learns which kernels to compile
(:mod:`pagebus.actors.executor.loading.compilation`).
"""

from __future__ import annotations

import torch

from pagebus.actors.executor.adapters.residents import make_residents
from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.device.agreement import ALONE, Agreement
from pagebus.actors.executor.graphs.graphs import Graphs
from pagebus.actors.executor.loading.head_weights import head_files
from pagebus.actors.executor.loading.kernel_cache import launch_shapes_folder
from pagebus.actors.executor.loading.kv_scales import calculate_scales
from pagebus.actors.executor.loading.limits import (
    batch_limits,
    cache_dtype,
    cache_format,
    decodes_apart,
    graph_tokens,
    pieces_tokens,
)
from pagebus.actors.executor.loading.loading import choose_ops
from pagebus.actors.executor.loading.warmup import run_adapted_steps, run_all_steps
from pagebus.actors.executor.memory.kv_cache import is_float8
from pagebus.actors.executor.models import build_model
from pagebus.actors.executor.pooling.parts import pools_all_tokens
from pagebus.actors.executor.ranks.absent import AbsentRanks
from pagebus.actors.executor.step.drafting import Lookup
from pagebus.actors.executor.step.prefill_backend import PrefillBackend
from pagebus.actors.executor.step.runner import Runner
from pagebus.actors.model.config import ModelConfig, effective_max_model_len
from pagebus.actors.settings import Settings
from pagebus.actors.settings.combinations.speculation import speculation
from pagebus.kernels.common.user_tables import read_user_tables

META = torch.device("meta")
NUM_BLOCKS = 1 << 16
"""Any number will do: no kernel may depend on how many blocks there are."""


def lonely_agreement(config: ModelConfig, device: torch.device = META) -> Agreement:
    """Of a rank on ``device`` whose others are not there; of a whole model, of one rank."""
    shard = config.shard
    return ALONE if shard is None else Agreement(AbsentRanks(shard.rank, shard.world, device))


def make_runner(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> tuple[PersistentBatch, Runner]:
    """A batch and a runner as an engine with these settings has on a GPU, but without the GPU."""
    read_user_tables(launch_shapes_folder(settings))
    limits, agreement = batch_limits(settings, config, META, NUM_BLOCKS), lonely_agreement(config)
    ops = choose_ops(settings, META, agreement, config.shard)
    kv_dtype = cache_dtype(settings, config, dtype)
    model = build_model(
        config, META, dtype, ops, effective_max_model_len(settings, config), kv_dtype,
        backend=settings.attention_backend, deterministic=settings.deterministic, run=limits.longest_run,
    )  # fmt: skip
    head = head_files(settings, config)
    cached = cache_format(settings, config, dtype, head)
    cache = cached.allocate(limits.num_blocks, META)
    residents = make_residents(settings, model, ops, limits.most_samples, cached.block_bytes, lambda read: None)
    most_tokens = graph_tokens(settings, config, META, dtype)
    apart, wanted = decodes_apart(settings, config), speculation(settings)
    runner = Runner(
        model, ops, limits, META, cache, settings.pipeline_depth, most_tokens,
        pieces_tokens=pieces_tokens(settings, config, META), decodes_apart=apart,
        lookup=Lookup(wanted.longest, wanted.shortest),
        head=None if head is None else head.build(model, settings, with_weights=False),
        adapters=None if residents is None else residents.slots,
    )  # fmt: skip
    if residents is not None:
        residents.places.use(cache.blocks)
    agreement.use(runner.uploader.header.agreed)
    runner.split_prompts(PrefillBackend(runner).parts)
    return PersistentBatch(limits, decodes_apart=apart, pools_all=pools_all_tokens(config)), runner


@torch.inference_mode()
def dry_run(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> None:
    """Run every step that a start runs, and every pass that it captures."""
    batch, runner = make_runner(settings, config, dtype)
    if is_float8(runner.kv_cache.dtype) and settings.calculate_kv_scales:
        calculate_scales(runner.model)
    with runner.model.few_layers():
        run_all_steps(batch, runner)
        run_adapted_steps(batch, runner)
        if runner.model.passes_on:  # tokens of the last stage are stored by the first
            one = torch.zeros(1, dtype=torch.int32, device=META)
            runner.state.store_sampled(one, one, one)
    if graph_tokens(settings, config, META, dtype):
        Graphs(runner.buckets, adapters=runner.adapters is not None).capture(runner, lambda share: None)
