"""A decode step of a model in one CUDA graph, without an engine around it: to tune launch shapes, and for profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pagebus.actors.executor.batch.buckets import Bucket
from pagebus.actors.executor.batch.layout import TEMPERATURE, BatchLimits
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.graphs.capturing import no_collection
from pagebus.actors.executor.graphs.graphs import empty_step, padded_pass
from pagebus.actors.executor.loading.dry_run import lonely_agreement
from pagebus.actors.executor.loading.loading import shared_ops
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.memory.kv_cache import Cache, allocate_kv_cache
from pagebus.actors.executor.models import build_model
from pagebus.actors.executor.step.runner import Runner
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.common.int8 import split_blocks

BLOCK_SIZE = 16


class DecodeStep:
    """A model and a cache of random numbers, for up to ``max_rows`` rows of up to ``max_context`` tokens. On the meta
    device nothing has memory, and passes compute nothing. The part of a rank exchanges with nobody, and waits for
    nobody; all else is launched as by a rank among others."""

    def __init__(
        self, config: ModelConfig, device: torch.device, max_rows: int, max_context: int, num_tokens: int,
        dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype = torch.bfloat16, backend: str = "auto",
    ) -> None:  # fmt: skip
        """``num_tokens`` is what the cache holds; rows share blocks where that is not enough."""
        self.config = config
        self.limits = BatchLimits(
            max_num_seqs=max_rows, max_model_len=max_context + 1, max_num_batched_tokens=max_rows,
            block_size=BLOCK_SIZE, num_blocks=-(-num_tokens // BLOCK_SIZE), vocab_size=config.vocab_size,
        )  # fmt: skip
        ops, agreement = Ops.for_device(device), lonely_agreement(config, device)
        if config.shard is not None:
            ops = shared_ops(ops, device, agreement, config.shard)
        self.model = build_model(config, device, dtype, ops, max_context + 1, cache_dtype, backend=backend)
        blocks = allocate_kv_cache(config, self.limits.num_blocks, BLOCK_SIZE, cache_dtype, device)
        if not blocks.is_meta:
            load_weights(self.model, Path(), "dummy", 0, lambda _share: None)
            fill(blocks, config)
        self.runner = Runner(self.model, ops, self.limits, device, Cache(blocks, blocks), 2, max_rows)
        agreement.use(self.runner.uploader.header.agreed)
        state = self.runner.state
        state.columns.view(torch.float32)[TEMPERATURE].fill_(0.6)
        state.tokens.random_(0, config.vocab_size)
        self._order = np.random.default_rng(0).permutation(self.limits.num_blocks)

    def send(self, rows: int, context: int | list[int]) -> Bucket:
        """Tell the device that ``rows`` rows decode their token number ``context``, or each one of its own."""
        ints, lengths = np.arange(rows + 1, dtype=np.int32), np.broadcast_to(np.array(context, np.int32), rows)
        work = replace(
            empty_step(), num_decodes=rows, num_tokens=rows, max_query_len=1, max_context_len=int(lengths.max()),
            slots=ints[:rows], starts=lengths - 1, query_start=ints, positions=lengths,
            indexes=np.zeros(rows, np.int32), hidden_index=ints[:rows], context_lens=lengths,
            sample_slots=ints[:rows], sequence_ids=ints[:rows], any_random=True,
        )  # fmt: skip
        tables = np.zeros(self.runner.state.block_tables.shape, np.int32)
        used = lengths // BLOCK_SIZE + 1
        for row, end in enumerate(used.cumsum()):
            tables[row, : used[row]] = np.take(self._order, range(end - used[row], end), mode="wrap")
        self.runner.state.block_tables.copy_(torch.from_numpy(tables))
        bucket = Bucket(rows, rows)
        self.runner.uploader.send(work, bucket)
        return bucket

    @torch.inference_mode()
    def run(self, rows: int, context: int) -> None:
        """Once, kernel by kernel."""
        padded_pass(self.runner, self.send(rows, context))

    def capture(self, rows: int, context: int | list[int]) -> torch.cuda.CUDAGraph:
        """The step's graph."""
        bucket = self.send(rows, context)
        padded_pass(self.runner, bucket)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph):
            padded_pass(self.runner, bucket)
        return graph


def fill(cache: torch.Tensor, config: ModelConfig) -> None:
    """With random keys and values."""
    numbers, size = cache, 1.0
    if cache.dtype == torch.int8:
        numbers, scales = split_blocks(cache, config.num_layers, config.num_kv_heads, config.head_dim)
        scales.fill_(0.02)
        size = 40.0
    for blocks in numbers.split(1024):
        if cache.dtype.itemsize == 1:
            blocks.copy_(torch.randn(blocks.shape, device=cache.device, dtype=torch.bfloat16) * size)
        else:
            blocks.normal_()
