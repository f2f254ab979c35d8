"""Getting an executor ready: weights, cache, graphs. Runs in the device thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch

from pagebus.actors.executor.adapters.residents import make_residents
from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.device.agreement import ALONE, Agreement
from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.device import (
    check_attention,
    resolve_kv_dtype,
    resolve_token_budget,
)
from pagebus.actors.executor.device.gpu_limits import check_gpu
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.graphs.graphs import Graphs, pool_bytes, with_adapted
from pagebus.actors.executor.graphs.head_passes import HeadPass, head_passes
from pagebus.actors.executor.layers.sharded.sums import with_sums
from pagebus.actors.executor.loading.disk import open_disk
from pagebus.actors.executor.loading.head_weights import DraftFiles, head_files
from pagebus.actors.executor.loading.kernel_cache import launch_shapes_folder
from pagebus.actors.executor.loading.kv_scales import set_kv_scales
from pagebus.actors.executor.loading.loaded import EngineInfo, Loaded
from pagebus.actors.executor.loading.warmup import (
    measure_prefill_rate,
    run_adapted_steps,
    run_full_steps,
    run_head,
    run_long_steps,
    run_small_steps,
)
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.memory.budget import KvDemand, blocks_in, fixed_kv_bytes, measured_kv_bytes
from pagebus.actors.executor.memory.host_memory import HostMemory, num_host_blocks
from pagebus.actors.executor.memory.kv_cache import CacheFormat, blocks_needed, is_float8
from pagebus.actors.executor.memory.swap import make_copies, measure_copy_rate
from pagebus.actors.executor.models import build_model
from pagebus.actors.executor.moves.opening import may_move, open_moves, shares_host_tier
from pagebus.actors.executor.pooling.full_attention import takes_any_lengths
from pagebus.actors.executor.pooling.parts import pools_all_tokens
from pagebus.actors.executor.sampling.device_rank_sampling import device_ops_of_rank
from pagebus.actors.executor.sampling.rank_guesses import with_guesses
from pagebus.actors.executor.sampling.rank_sampling import ops_of_rank
from pagebus.actors.executor.step.drafting import Lookup
from pagebus.actors.executor.step.prefill_backend import PLAN_S, PrefillBackend, latent_sizes
from pagebus.actors.executor.step.runner import Runner
from pagebus.actors.model.config import ModelConfig, effective_max_model_len, num_layer_weights, planned_model_len
from pagebus.actors.model.shards.shard import Shard
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.combinations.speculation import speculation
from pagebus.bus.messages import FromExecutor
from pagebus.kernels.attention import cudnn_prefill, hopper_prefill
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.user_tables import read_user_tables
from pagebus.kernels.latent import expanded_plan

LAUNCH_FLOPS = 15_000_000_000_000
"""Products of a step that take the device about as long as a busy host takes to launch all kernels: 23 ms of an H200.
(A step of llama8b with 512 tokens computes for 13 ms, and was launched in 15 beside the other actors; one of 1024 takes
21 to 24 ms either way.) A larger step gains nothing from a graph, and would be padded."""
MAX_GRAPH_TOKENS = 4096
MAX_ENCODER_GRAPH_TOKENS = 512
"""In a graph, attention of an encoder has programs for rows as long as the graph, whatever the rows are: many more than
it needs, of large ones."""

Progress = Callable[[str, float], None]
"""Called with the phase ("weights", "kernels", "kv cache", "graphs") and the done share of it, 0..1."""


def choose_ops(
    settings: Settings, device: torch.device, agreement: Agreement = ALONE, shard: Shard | None = None
) -> Ops:
    """What steps are computed with: the device's operations, invariant ones if the settings want that; those of a rank
    that holds ``shard``."""
    invariant = settings.deterministic and device.type != "cpu"
    ops = Ops.invariant() if invariant else Ops.for_device(device)
    return ops if shard is None else shared_ops(ops, device, agreement, shard, invariant=invariant)


def shared_ops(ops: Ops, device: torch.device, agreement: Agreement, shard: Shard, *, invariant: bool = False) -> Ops:
    """``ops`` of a rank that holds ``shard``."""
    with_sampling = ops_of_rank if device.type == "cpu" else device_ops_of_rank
    sums = with_sums(ops, agreement.comm, invariant=invariant)
    return with_guesses(with_sampling(sums, agreement, shard), shard)


def load(
    settings: Settings,
    config: ModelConfig,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    kernels_ready: Callable[[], None],
    agreement: Agreement = ALONE,
    tell: Callable[[FromExecutor], None] = lambda read: None,
) -> Loaded:
    """Load the model in ``path`` and make everything ready for the first step. Calls ``kernels_ready``, which may wait,
    before the first kernel. ``agreement`` has what meets the other ranks once the weights are there. ``tell``
    gets what becomes of adapters, files and pulls.

    Raises:
        ModelError: the weights do not fit the configuration.
        SettingsError: the device cannot do what is asked of it.
        EngineError: too little memory.
    """
    head = head_files(settings, config, path)
    cached = cache_format(settings, config, dtype, head)
    block_bytes = cached.block_bytes
    num_blocks = 0 if config.in_one_step else num_host_blocks(settings.swap_space, block_bytes)
    shared = shares_host_tier(settings, config, agreement.comm, device)
    memory = HostMemory(num_blocks, block_bytes, device, shared=shared)
    try:
        return _load(
            settings, config, path, device, dtype, progress, kernels_ready, memory, agreement, head, cached, tell
        )
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
    agreement: Agreement,
    head: DraftFiles | None,
    cached: CacheFormat,
    tell: Callable[[FromExecutor], None],
) -> Loaded:
    comm = agreement.comm
    check_attention(settings, device)
    check_gpu(settings, config, target_of(device))
    read_user_tables(launch_shapes_folder(settings))
    ops = choose_ops(settings, device, agreement, config.shard)
    limits = batch_limits(settings, config, device, num_blocks=1)
    demand = demand_of(limits, memory.block_bytes)
    known_bytes = fixed_kv_bytes(settings, demand, device)
    if config.in_one_step:  # nothing is cached: blocks for all sequences are next to nothing
        known_bytes = blocks_needed(limits.max_num_seqs, limits.max_model_len, limits.block_size) * demand.block_bytes
    if known_bytes is not None:
        blocks_in(known_bytes, demand, settings, device, measured=False)  # fail before the weights are read

    progress("weights", 0.0)
    kv_dtype = cache_dtype(settings, config, dtype)
    model = build_model(
        config, device, dtype, ops, effective_max_model_len(settings, config), kv_dtype,
        backend=settings.attention_backend, deterministic=settings.deterministic, run=limits.longest_run,
    )  # fmt: skip
    load_weights(model, path, settings.load_format, settings.seed, lambda share: progress("weights", share))
    drafter = None if head is None else head.build(model, settings)
    residents = make_residents(settings, model, ops, limits.most_samples, tell)
    comm.connect()
    progress("kernels", 0.0)
    kernels_ready()
    if is_float8(kv_dtype):
        set_kv_scales(model, path, settings)
    progress("kv cache", 0.0)
    first_cache = cached.allocate(1, device)
    apart = decodes_apart(settings, config)
    batch = PersistentBatch(limits, decodes_apart=apart, pools_all=pools_all_tokens(config))
    most_tokens = int(comm.least(graph_tokens(settings, config, device, dtype))) if comm.captures else 0
    wanted = speculation(settings)
    runner = Runner(
        model, ops, limits, device, first_cache, settings.pipeline_depth, most_tokens,
        pieces_tokens=_agreed_pieces(settings, config, device, config.hidden_size * dtype.itemsize, comm),
        decodes_apart=apart,
        lookup=Lookup(wanted.longest, wanted.shortest), head=drafter,
        adapters=None if residents is None else residents.slots,
    )  # fmt: skip
    if model.passage is not None and device.type == "cuda":
        most = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        model.passage.reserve(most, config.hidden_size, dtype, device)
    agreement.use(runner.uploader.header.agreed)
    check_alike(runner, comm)
    prefill_backend = PrefillBackend(runner)
    runner.select_long_rows = prefill_backend.parts
    measured = known_bytes is None
    if known_bytes is None:
        with model.few_layers():
            known_bytes = _profile(settings, device, batch, runner, use_graphs=most_tokens > 0)
    num_blocks = blocks_in(known_bytes, demand, settings, device, measured=measured)
    limits = replace(limits, num_blocks=int(comm.least(num_blocks)))
    batch.limits = runner.limits = limits
    moves = may_move(settings, config, comm)
    cache = cached.allocate(limits.num_blocks, device, shared=moves)
    runner.use(cache)
    progress("kv cache", 1.0)

    _warm(batch, runner, lambda share: progress("graphs", share), use_graphs=most_tokens > 0)
    prefill_backend.plan_s = PLAN_S
    memory.use(int(comm.least(memory.num_blocks)))
    copy_rate = comm.least(measure_copy_rate(runner.blocks, memory))
    prefill_rate = comm.least(measure_prefill_rate(batch, runner) if copy_rate or moves else 0.0)
    files = None if head is None else head.path
    disk = open_disk(settings, path, files, cached, memory, tell)
    mover = open_moves(settings, path, files, cached, cache, memory, tell) if moves else None
    info = EngineInfo(
        **asdict(limits),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        num_host_blocks=memory.num_ready,
        block_bytes=int(-comm.least(-demand.block_bytes)),
        copy_bytes_per_s=copy_rate,
        prefill_tokens_per_s=prefill_rate,
        kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
        max_loras=0 if residents is None else settings.max_loras,
        num_disk_blocks=0 if disk is None else disk.num_blocks,
        stages=1 if config.stage is None else config.stage.count,
        kv_kind="" if mover is None else mover.kv_kind,
        kv_address="" if mover is None else mover.kv_address,
        kv_host="" if mover is None else mover.kv_host,
    )
    return Loaded(batch, runner, make_copies(runner.blocks, memory), prefill_backend, info, residents, disk, mover)


def check_alike(runner: Runner, comm: Comm) -> None:
    """Whether all ranks of a stage cut prompts alike, as what steps are padded to depends on that.

    Raises:
        SettingsError: their heads differ too much.
    """
    size = runner.buckets.block_queries
    if comm.size > 1 and runner.buckets.largest().tokens > 1 and comm.least(size) != -comm.least(-size):
        raise SettingsError(
            f"--tensor-parallel-size {comm.size}: CUDA graphs of ranks with different heads of attention are not "
            "built; use --enforce-eager, or as many ranks as divide the heads evenly"
        )


def cache_dtype(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """The cache's number format; of a model that caches nothing its own."""
    return dtype if config.in_one_step else resolve_kv_dtype(settings, dtype)


def cache_format(settings: Settings, config: ModelConfig, dtype: torch.dtype, head: DraftFiles | None) -> CacheFormat:
    """What lies in a block of the cache; of a draft head in the model's own format."""
    kv_dtype = cache_dtype(settings, config, dtype)
    return CacheFormat(config, settings.block_size, kv_dtype, None if head is None else head.cached, dtype)


def batch_limits(settings: Settings, config: ModelConfig, device: torch.device, num_blocks: int) -> BatchLimits:
    """The limits that follow from settings and model."""
    budget = resolve_token_budget(settings, device)
    if config.in_one_step:  # the longest prompt has to fit; where the setting says less, it is no longer than that
        budget = max(budget, effective_max_model_len(settings, config))
    groups = config.cache_groups
    return BatchLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=planned_model_len(settings, config),
        max_num_batched_tokens=budget,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        vocab_size=config.vocab_size,
        window=config.kept_window,
        windowed_pages=groups.windowed_pages,
        windowed_tokens=groups.windowed_tokens,
        num_drafts=num_drafts(settings, config),
    )


def num_drafts(settings: Settings, config: ModelConfig) -> int:
    """The most drafts of a row; by default none of a model that only pools, which samples nothing. Without a
    number, MTP guesses one token with each of its layers.

    Raises:
        SettingsError: the settings ask for drafts of such a model.
    """
    wanted = speculation(settings)
    if config.stage is not None:
        return 0
    if config.pooler is None:
        return wanted.tokens or (config.num_mtp_layers if wanted.method == "mtp" else 0)
    if settings.spec_method is not None and wanted.method != "none":
        raise SettingsError(f"--spec-method {wanted.method}: this model samples no tokens")
    return 0


def demand_of(limits: BatchLimits, block_bytes: int) -> KvDemand:
    """What a cache of such blocks must hold."""
    most_tokens = limits.max_num_batched_tokens
    return KvDemand(
        block_bytes, limits.block_size, limits.max_model_len, limits.windowed_tokens or limits.window, most_tokens,
        limits.windowed_pages,
    )  # fmt: skip


def decodes_apart(settings: Settings, config: ModelConfig) -> bool:
    """Whether rows of one token have kernels of their own: not where results depend on no other row, nor of an encoder,
    for which they are prompts as all others."""
    return not settings.deterministic and not config.in_one_step


def graph_tokens(settings: Settings, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> int:
    """The most tokens of a step that runs from a CUDA graph, 0 for none."""
    if device.type == "cpu" or settings.enforce_eager:
        return 0
    if config.in_one_step and not takes_any_lengths(dtype, config.head_dim):
        return 0
    if settings.max_cudagraph_capture_size is not None:
        return settings.max_cudagraph_capture_size
    if config.in_one_step:
        return min(MAX_ENCODER_GRAPH_TOKENS, _hidden_by_computing(config))
    return max(settings.max_num_seqs, min(MAX_GRAPH_TOKENS, _hidden_by_computing(config)))


def pieces_tokens(settings: Settings, config: ModelConfig, device: torch.device) -> int:
    """The most tokens of a step that runs from graphs of its pieces, 0 for none: a norm apart from the sum before it
    may round otherwise, so ``deterministic`` outputs have none."""
    limited = config.in_one_step or settings.enforce_eager or settings.max_cudagraph_capture_size is not None
    return 0 if device.type == "cpu" or limited or settings.deterministic else _hidden_by_computing(config)


def _agreed_pieces(settings: Settings, config: ModelConfig, device: torch.device, row_bytes: int, comm: Comm) -> int:
    """:func:`pieces_tokens` of all ranks, whose sums of rows of ``row_bytes`` may be captured."""
    most_bytes = min(pieces_tokens(settings, config, device) * row_bytes, comm.captured_bytes)
    return int(comm.least(most_bytes // row_bytes))


def _hidden_by_computing(config: ModelConfig) -> int:
    """Tokens of a step that computes for as long as it takes to launch."""
    return LAUNCH_FLOPS // (2 * num_layer_weights(config))


def _profile(
    settings: Settings, device: torch.device, batch: PersistentBatch, runner: Runner, *, use_graphs: bool
) -> int:
    """Bytes for the cache: run the largest steps, see what is left."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    adapters = runner.adapters
    with nullcontext() if adapters is None else adapters.assumed():
        graph_bytes, peak = run_full_steps(batch, runner)
    peak += _prefill_scratch_bytes(batch.limits, runner)
    num_graphs = 0
    if use_graphs:
        graph_bytes = max(graph_bytes, pool_bytes(runner, adapters=adapters is not None))
        buckets = [*runner.buckets.first(), *runner.buckets.later()]
        num_graphs = len(with_adapted(buckets, adapters=adapters is not None))
        num_graphs += len(_passes(runner))
    return measured_kv_bytes(settings, device, max(peak, before), num_graphs, graph_bytes)


def _passes(runner: Runner) -> list[HeadPass]:
    """Those of a draft head that have graphs."""
    return [] if runner.head is None else head_passes(runner.buckets, follows=runner.head.follows)


def _prefill_scratch_bytes(limits: BatchLimits, runner: Runner) -> int:
    """What a prompt with a long past takes beyond those of the full steps, which have none."""
    config, most = runner.model.config, limits.max_num_batched_tokens
    past = limits.max_model_len - most
    if past <= 0:
        return 0
    sizes = latent_sizes(runner)
    if sizes is not None:
        return expanded_plan.scratch_bytes(most, limits.max_model_len, sizes)
    heads, size = (config.num_heads, config.num_kv_heads, config.head_dim), runner.model.parameters.dtype.itemsize
    by_library = cudnn_prefill.scratch_bytes(most, past, *heads, size)
    return max(by_library, hopper_prefill.scratch_bytes(most, limits.max_model_len, *heads, size))


def _warm(batch: PersistentBatch, runner: Runner, progress: Callable[[float], None], *, use_graphs: bool) -> None:
    """Compile and load what steps need, then capture the graphs."""
    progress(0.0)
    with runner.model.few_layers():
        run_small_steps(batch, runner, thorough=runner.kv_cache.is_cuda)
        run_head(batch, runner)
        if runner.kv_cache.is_cuda:
            run_long_steps(batch, runner)
        run_adapted_steps(batch, runner)
    if use_graphs:
        alike = runner.model.config.shard is not None
        graphs = Graphs(runner.buckets, adapters=runner.adapters is not None, passes=_passes(runner), alike=alike)
        graphs.capture(runner, progress)
        runner.graphs = graphs
        run_small_steps(batch, runner, thorough=False)
    if runner.kv_cache.is_cuda:
        torch.cuda.synchronize()
    progress(1.0)
