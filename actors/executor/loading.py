"""Getting an executor ready: weights, cache, graphs. Runs in the device thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from actors.executor.batch import BatchLimits, PersistentBatch
from actors.executor.device import resolve_token_budget
from actors.executor.graphs import DecodeGraphs, bucket_sizes
from actors.executor.host_memory import HostMemory, num_host_blocks
from actors.executor.kv_cache import allocate_kv_cache, kv_block_bytes
from actors.executor.memory import KvDemand, blocks_in, fixed_kv_bytes, measured_kv_bytes
from actors.executor.models import build_model
from actors.executor.ops import Ops
from actors.executor.runner import Runner
from actors.executor.swap import Copies, make_copies, measure_copy_rate
from actors.executor.warmup import measure_prefill_rate, run_full_steps, run_small_steps
from actors.executor.weights import load_weights
from actors.model_config import ModelConfig, effective_max_model_len
from actors.settings import Settings

Progress = Callable[[str, float], None]
"""Called with the phase ("weights", "kernels", "kv cache", "graphs") and the done share of it, 0..1."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine that is ready can hold; the scheduler plans by it."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    device: str
    dtype: str
    num_host_blocks: int = 0
    """Those of the host tier that are ready by now; more may come."""
    block_bytes: int = 0
    copy_bytes_per_s: float = 0.0
    """Between the tiers, the slower way's; measured, 0 without a host tier."""
    prefill_tokens_per_s: float = 0.0
    """Measured, 0 without a host tier."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine's parts, ready to run steps."""

    batch: PersistentBatch
    runner: Runner
    copies: Copies
    info: EngineInfo


def load(
    settings: Settings,
    config: ModelConfig,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    kernels_ready: Callable[[], None],
) -> Loaded:
    """Load the model in ``path`` and make everything ready for the first step. Calls ``kernels_ready``, which may wait,
    before the first kernel.

    Raises:
        ModelError: the weights do not fit the configuration.
        EngineError: too little memory.
    """
    block_bytes = kv_block_bytes(config, settings.block_size, dtype)
    memory = HostMemory(num_host_blocks(settings.swap_space, block_bytes), block_bytes, device)
    try:
        return _load(settings, config, path, device, dtype, progress, kernels_ready, memory)
    except BaseException:
        memory.close()
        raise


def _load(
    settings: Settings,
    config: ModelConfig,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    kernels_ready: Callable[[], None],
    memory: HostMemory,
) -> Loaded:
    ops = Ops.for_device(device)
    limits = batch_limits(settings, config, device, num_blocks=1)
    demand = KvDemand(memory.block_bytes, limits.block_size, limits.max_model_len)
    known_bytes = fixed_kv_bytes(settings, demand, device)
    if known_bytes is not None:
        blocks_in(known_bytes, demand, settings, device, measured=False)  # fail before the weights are read

    progress("weights", 0.0)
    model = build_model(config, device, dtype, ops, limits.max_model_len)
    load_weights(model, path, settings.load_format, settings.seed, lambda share: progress("weights", share))

    progress("kernels", 0.0)
    kernels_ready()
    progress("kv cache", 0.0)
    first_cache = allocate_kv_cache(config, 1, limits.block_size, dtype, device)
    batch = PersistentBatch(limits)
    runner = Runner(model, ops, limits, device, first_cache, settings.pipeline_depth)
    largest = largest_graph(settings, device)
    measured = known_bytes is None
    if known_bytes is None:
        known_bytes = _profile(settings, device, batch, runner, largest)
    limits = replace(limits, num_blocks=blocks_in(known_bytes, demand, settings, device, measured=measured))
    batch.limits = runner.limits = limits
    runner.kv_cache = allocate_kv_cache(config, limits.num_blocks, limits.block_size, dtype, device)
    progress("kv cache", 1.0)

    _warm(batch, runner, largest, lambda share: progress("graphs", share))
    copy_rate = measure_copy_rate(runner.kv_cache, memory)
    prefill_rate = measure_prefill_rate(batch, runner) if copy_rate else 0.0
    info = EngineInfo(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=limits.vocab_size,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        num_host_blocks=memory.num_ready,
        block_bytes=demand.block_bytes,
        copy_bytes_per_s=copy_rate,
        prefill_tokens_per_s=prefill_rate,
    )
    return Loaded(batch, runner, make_copies(runner.kv_cache, memory), info)


def batch_limits(settings: Settings, config: ModelConfig, device: torch.device, num_blocks: int) -> BatchLimits:
    """The limits that follow from settings and model."""
    return BatchLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=effective_max_model_len(settings, config),
        max_num_batched_tokens=resolve_token_budget(settings, device),
        block_size=settings.block_size,
        num_blocks=num_blocks,
        vocab_size=config.vocab_size,
    )


def largest_graph(settings: Settings, device: torch.device) -> int:
    """Rows of the largest CUDA graph, 0 for none."""
    if device.type == "cpu" or settings.enforce_eager:
        return 0
    return min(settings.max_num_seqs, settings.max_cudagraph_capture_size)


def _profile(settings: Settings, device: torch.device, batch: PersistentBatch, runner: Runner, largest: int) -> int:
    """Bytes for the cache: run the largest steps, see what is left."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    graph_bytes, peak = run_full_steps(batch, runner)
    num_graphs = len(bucket_sizes(largest)) if largest else 0
    return measured_kv_bytes(settings, device, max(peak, before), num_graphs, graph_bytes)


def _warm(batch: PersistentBatch, runner: Runner, largest: int, progress: Callable[[float], None]) -> None:
    """Compile what small steps need, then capture the graphs."""
    progress(0.0)
    run_small_steps(batch, runner)
    if largest:
        graphs = DecodeGraphs(largest)
        graphs.capture(runner, progress)
        runner.graphs = graphs
        run_small_steps(batch, runner)
    if runner.kv_cache.is_cuda:
        torch.cuda.synchronize()
    progress(1.0)
