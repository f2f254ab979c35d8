"""An engine's warm-up on tensors without memory: every kernel is launched as on the GPU, but nothing is computed.

What is launched depends on the settings, the model and the GPU (:mod:`kernels.target`), never on values, so shapes are
enough. Whoever listens to Triton meanwhile learns what there is to compile (:mod:`actors.executor.compilation`).
"""

from __future__ import annotations

import torch

from actors.executor.batch import PersistentBatch
from actors.executor.graphs import DecodeGraphs
from actors.executor.kv_cache import allocate_kv_cache
from actors.executor.loading import batch_limits, largest_graph
from actors.executor.models import build_model
from actors.executor.ops import Ops
from actors.executor.runner import Runner
from actors.executor.warmup import run_all_steps
from actors.model_config import ModelConfig
from actors.settings import Settings

META = torch.device("meta")
NUM_BLOCKS = 1 << 16
"""Any number will do: no kernel may depend on how many blocks there are."""


def make_runner(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> tuple[PersistentBatch, Runner]:
    """A batch and a runner as an engine with these settings has on a GPU, but without the GPU."""
    limits, ops = batch_limits(settings, config, META, NUM_BLOCKS), Ops.for_device(META)
    model = build_model(config, META, dtype, ops, limits.max_model_len)
    cache = allocate_kv_cache(config, limits.num_blocks, limits.block_size, dtype, META)
    return PersistentBatch(limits), Runner(model, ops, limits, META, cache, settings.pipeline_depth)


@torch.inference_mode()
def rehearse(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> None:
    """Run every step that a start runs, and every pass that it captures."""
    batch, runner = make_runner(settings, config, dtype)
    run_all_steps(batch, runner)
    largest = largest_graph(settings, META)
    if largest:
        DecodeGraphs(largest).capture(runner, lambda share: None)
