"""Getting an executor ready: weights, cache, graphs. Runs in the device thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from pagebus.actors.executor.adapters.residents import Residents, make_residents
from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.device.agreement import ALONE, Agreement
from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.device import check_attention
from pagebus.actors.executor.device.free_memory import free_bytes
from pagebus.actors.executor.device.gpu_limits import check_gpu
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.graphs.graphs import Graphs, pool_bytes, with_adapted
from pagebus.actors.executor.graphs.head_passes import HeadPass, head_passes
from pagebus.actors.executor.layers.sharded.sums import with_sums
from pagebus.actors.executor.loading.head_weights import DraftFiles, head_files
from pagebus.actors.executor.loading.kernel_cache import launch_shapes_folder
from pagebus.actors.executor.loading.kv_scales import set_kv_scales
from pagebus.actors.executor.loading.limits import (
    agreed_pieces,
    batch_limits,
    cache_dtype,
    cache_format,
    decodes_apart,
    demand_of,
    graph_tokens,
)
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
from pagebus.actors.executor.memory.disk_tier import DiskTier
from pagebus.actors.executor.memory.host_memory import HostMemory, num_host_blocks
from pagebus.actors.executor.memory.kv_cache import Cache, CacheFormat, blocks_needed, is_float8
from pagebus.actors.executor.memory.open_disk import open_disk
from pagebus.actors.executor.memory.swap import make_copies, measure_copy_rate
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.executor.models.draft_head import DraftHead
from pagebus.actors.executor.moves.moves import Moves
from pagebus.actors.executor.moves.opening import may_move, open_moves, shares_host_tier
from pagebus.actors.executor.pooling.parts import pools_all_tokens
from pagebus.actors.executor.sampling.device_rank_sampling import device_ops_of_rank
from pagebus.actors.executor.sampling.rank_guesses import with_guesses
from pagebus.actors.executor.sampling.rank_sampling import ops_of_rank
from pagebus.actors.executor.step.drafting import Lookup
from pagebus.actors.executor.step.prefill_backend import PLAN_S, PrefillBackend, latent_sizes
from pagebus.actors.executor.step.runner import Runner
from pagebus.actors.model.config import ModelConfig, effective_max_model_len
from pagebus.actors.model.shards.shard import Shard
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.combinations.speculation import speculation
from pagebus.bus.messages import FromExecutor
from pagebus.kernels.attention import cudnn_prefill, hopper_prefill
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.user_tables import read_user_tables
from pagebus.kernels.latent import expanded_plan

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
    on_host = (fixed_kv_bytes(settings, block_bytes, device) or 0) if device.type == "cpu" else 0
    num_blocks = 0 if config.in_one_step else num_host_blocks(settings.swap_space, block_bytes, free_bytes() - on_host)
    shared = shares_host_tier(settings, config, device)
    memory = HostMemory(num_blocks, block_bytes, device, shared=shared)
    loading = _Loading(settings, config, path, device, dtype, head, cached, memory, agreement, progress, tell)
    try:
        return loading.run(kernels_ready)
    except BaseException:
        memory.close()
        raise


@dataclass(frozen=True, slots=True)
class _Loading:
    """What is to be loaded, and who hears of it."""

    settings: Settings
    config: ModelConfig
    path: Path
    device: torch.device
    dtype: torch.dtype
    head: DraftFiles | None
    cached: CacheFormat
    memory: HostMemory
    agreement: Agreement
    progress: Progress
    tell: Callable[[FromExecutor], None]

    @property
    def comm(self) -> Comm:
        return self.agreement.comm

    @property
    def kv_dtype(self) -> torch.dtype:
        return cache_dtype(self.settings, self.config, self.dtype)

    def run(self, kernels_ready: Callable[[], None]) -> Loaded:
        """All of it, in order. Ranks meet at each number that they agree on."""
        settings, config, comm, memory = self.settings, self.config, self.comm, self.memory
        limits = batch_limits(settings, config, self.device, num_blocks=1)
        demand = demand_of(limits, memory.block_bytes)
        ops = self.checked_ops()
        known_bytes = self.known_kv_bytes(limits, demand)  # fails before the weights are read
        model, drafter, residents = self.read_model(ops, limits)
        comm.connect()
        self.progress("kernels", 0.0)
        kernels_ready()
        if is_float8(self.kv_dtype):
            set_kv_scales(model, self.path, settings)
        self.progress("kv cache", 0.0)
        most_tokens = int(comm.least(graph_tokens(settings, config, self.device, self.dtype))) if comm.captures else 0
        batch, runner = self.make_runner(model, ops, limits, most_tokens, drafter, residents)
        prefill_backend = PrefillBackend(runner)
        runner.split_prompts(prefill_backend.parts)
        cache = self.make_cache(batch, runner, demand, known_bytes, use_graphs=most_tokens > 0)
        if residents is not None:
            residents.places.use(cache.blocks)
        self.progress("kv cache", 1.0)
        _warm(batch, runner, lambda share: self.progress("graphs", share), use_graphs=most_tokens > 0)
        prefill_backend.spare(PLAN_S)
        memory.use(int(comm.least(memory.num_blocks)))
        copy_rate, prefill_rate = self.measure_rates(batch, runner)
        disk, moves = self.open_tiers(cache)
        info = self.info_of(batch.limits, demand, copy_rate, prefill_rate, residents, disk, moves)
        copies = make_copies(runner.blocks, memory)
        return Loaded(batch, runner, copies, prefill_backend, info, residents, disk, moves)

    def checked_ops(self) -> Ops:
        """What steps are computed with, on a device that can do what is asked of it."""
        check_attention(self.settings, self.device)
        check_gpu(self.settings, self.config, target_of(self.device))
        read_user_tables(launch_shapes_folder(self.settings))
        return choose_ops(self.settings, self.device, self.agreement, self.config.shard)

    def known_kv_bytes(self, limits: BatchLimits, demand: KvDemand) -> int | None:
        """Bytes for the cache, where they are known before the weights are there; None: what will be left."""
        if self.config.in_one_step:  # nothing is cached: blocks for all sequences are next to nothing
            blocks = blocks_needed(limits.max_num_seqs, limits.max_model_len, limits.block_size)
            known_bytes: int | None = blocks * demand.block_bytes
        else:
            known_bytes = fixed_kv_bytes(self.settings, demand.block_bytes, self.device)
        if known_bytes is not None:
            blocks_in(known_bytes, demand, self.settings, self.device, measured=False)
        return known_bytes

    def read_model(self, ops: Ops, limits: BatchLimits) -> tuple[Model, DraftHead | None, Residents | None]:
        """The model with its weights, what guesses for it, and its adapters."""
        settings, config = self.settings, self.config
        self.progress("weights", 0.0)
        model = build_model(
            config, self.device, self.dtype, ops, effective_max_model_len(settings, config), self.kv_dtype,
            backend=settings.attention_backend, deterministic=settings.deterministic, run=limits.longest_run,
        )  # fmt: skip
        load_weights(
            model, self.path, settings.load_format, settings.seed, lambda share: self.progress("weights", share)
        )
        drafter = None if self.head is None else self.head.build(model, settings)
        block_bytes = self.memory.block_bytes
        return model, drafter, make_residents(settings, model, ops, limits.most_samples, block_bytes, self.tell)

    def make_runner(
        self, model: Model, ops: Ops, limits: BatchLimits, most_tokens: int, drafter: DraftHead | None,
        residents: Residents | None,
    ) -> tuple[PersistentBatch, Runner]:  # fmt: skip
        """An empty batch and what runs its steps, over a cache of one block."""
        settings, config, comm = self.settings, self.config, self.comm
        apart, wanted = decodes_apart(settings, config), speculation(settings)
        batch = PersistentBatch(limits, decodes_apart=apart, pools_all=pools_all_tokens(config))
        row_bytes = config.hidden_size * self.dtype.itemsize
        runner = Runner(
            model, ops, limits, self.device, self.cached.allocate(1, self.device), settings.pipeline_depth, most_tokens,
            pieces_tokens=agreed_pieces(settings, config, self.device, row_bytes, comm),
            decodes_apart=apart,
            lookup=Lookup(wanted.longest, wanted.shortest), head=drafter,
            adapters=None if residents is None else residents.slots,
        )  # fmt: skip
        if model.passage is not None and self.device.type == "cuda":
            model.passage.reserve(limits.most_tokens, config.hidden_size, self.dtype, self.device)
        if residents is not None:
            residents.places.use(runner.blocks)
        self.agreement.use(runner.uploader.header.agreed)
        check_alike(runner, comm)
        return batch, runner

    def make_cache(
        self, batch: PersistentBatch, runner: Runner, demand: KvDemand, known_bytes: int | None, *, use_graphs: bool
    ) -> Cache:
        """The cache, of as many blocks as there is memory for on every rank. Batch and runner use it."""
        measured = known_bytes is None
        if known_bytes is None:
            with runner.model.few_layers():
                known_bytes = _profile(self.settings, self.device, batch, runner, use_graphs=use_graphs)
        num_blocks = blocks_in(known_bytes, demand, self.settings, self.device, measured=measured)
        limits = replace(batch.limits, num_blocks=int(self.comm.least(num_blocks)))
        cache = self.cached.allocate(limits.num_blocks, self.device, shared=self.may_move)
        batch.use(limits)
        runner.use(cache, limits)
        return cache

    @property
    def may_move(self) -> bool:
        return may_move(self.settings, self.config)

    def open_tiers(self, cache: Cache) -> tuple[DiskTier | None, Moves | None]:
        """The tier on disk, and what pulls blocks from others, if there are to be such."""
        files = None if self.head is None else self.head.path
        disk = open_disk(self.settings, self.path, files, self.cached, self.memory, self.tell)
        if not self.may_move:
            return disk, None
        return disk, open_moves(
            self.settings, self.path, files, self.cached, cache, self.memory, self.comm, self.tell
        )  # fmt: skip

    def measure_rates(self, batch: PersistentBatch, runner: Runner) -> tuple[float, float]:
        """Bytes per second between the tiers, and prompt tokens per second; 0 for what nobody asks."""
        copy_rate = self.comm.least(measure_copy_rate(runner.blocks, self.memory))
        wanted = copy_rate or self.may_move
        return copy_rate, self.comm.least(measure_prefill_rate(batch, runner) if wanted else 0.0)

    def info_of(
        self, limits: BatchLimits, demand: KvDemand, copy_rate: float, prefill_rate: float,
        residents: Residents | None, disk: DiskTier | None, moves: Moves | None,
    ) -> EngineInfo:  # fmt: skip
        """What the executor tells of its engine."""
        stage = self.config.stage
        return EngineInfo(
            **asdict(limits),
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            num_host_blocks=self.memory.num_ready,
            block_bytes=int(-self.comm.least(-demand.block_bytes)),
            copy_bytes_per_s=copy_rate,
            prefill_tokens_per_s=prefill_rate,
            kv_cache_dtype=str(self.kv_dtype).removeprefix("torch."),
            max_loras=0 if residents is None else self.settings.max_loras,
            most_loras=0 if residents is None else residents.places.count,
            num_disk_blocks=0 if disk is None else disk.num_blocks,
            stages=1 if stage is None else stage.count,
            kv_kind="" if moves is None else moves.kv_kind,
            kv_address="" if moves is None else moves.kv_address,
            kv_host="" if moves is None else moves.kv_host,
        )


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
        runner.replay(graphs)
        run_small_steps(batch, runner, thorough=False)
    if runner.kv_cache.is_cuda:
        torch.cuda.synchronize()
    progress(1.0)
