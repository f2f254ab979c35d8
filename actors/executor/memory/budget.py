"""Sizes the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.model.window import Window
from pagebus.actors.settings import Settings, SettingsError

GIB = 1 << 30
BYTES_PER_GRAPH = 4 << 20
"""What the driver keeps per captured graph of a few hundred kernels, generously: 1 to 2 MiB were measured."""


@dataclass(frozen=True, slots=True)
class KvDemand:
    """What the cache must hold: one block takes ``block_bytes``, one sequence of ``max_model_len`` must fit. Of a model
    with a ``window`` in all layers this is no more than the window and the ``most_tokens`` of a step. Where only some
    layers have one, blocks are pages: each block of tokens has one and, within the window, ``windowed_pages`` more."""

    block_bytes: int
    block_size: int
    max_model_len: int
    window: int = 0
    most_tokens: int = 0
    windowed_pages: int = 0

    @property
    def least_blocks(self) -> int:
        """Blocks of one sequence."""
        every = -(-self.max_model_len // self.block_size)
        if not self.window:
            return every
        held = min(every, self._most_held)
        return every + held * self.windowed_pages if self.windowed_pages else held

    def longest(self, num_blocks: int) -> int:
        """Tokens of a sequence that takes so many blocks, were its length not limited."""
        if each := self.windowed_pages:
            num_blocks = max(num_blocks // (1 + each), num_blocks - each * self._most_held)
        return num_blocks * self.block_size

    @property
    def _most_held(self) -> int:
        """Blocks that lie within the window of a step's tokens at most; there is one."""
        return Window(self.window, self.block_size).most_blocks(self.most_tokens)


def fixed_kv_bytes(settings: Settings, block_bytes: int, device: torch.device) -> int | None:
    """Cache bytes that the settings alone decide; None where a share of the GPU has to be measured."""
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override * block_bytes
    if settings.kv_cache_memory_bytes is not None:
        return settings.kv_cache_memory_bytes
    return int(settings.cpu_kv_cache_gib * GIB) if device.type == "cpu" else None


def measured_kv_bytes(settings: Settings, device: torch.device, peak: int, num_graphs: int, graph_bytes: int) -> int:
    """Cache bytes that the wanted share of the GPU leaves, after a profiling run whose peak was ``peak`` bytes.

    ``graph_bytes`` is what the largest pass that is captured takes on top of the weights: the graphs' pool will take it
    once more. Memory of other programs counts as used.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    graphs = graph_bytes + num_graphs * BYTES_PER_GRAPH if num_graphs else 0
    left = int(total * settings.gpu_memory_utilization) - peak - outside_torch - graphs
    if left <= 0:
        raise EngineError(
            f"no GPU memory is left for the KV cache: weights and activations take {peak / GIB:.2f} GiB, other use is "
            f"{outside_torch / GIB:.2f} GiB, of {total / GIB:.2f} GiB at --gpu-memory-utilization "
            f"{settings.gpu_memory_utilization}; raise it, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    return left


def memory_in_use(device: torch.device) -> tuple[int, int] | None:
    """Bytes of the GPU's memory that are in use, by whomever, and all it has; None of a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def blocks_in(kv_bytes: int, demand: KvDemand, settings: Settings, device: torch.device, *, measured: bool) -> int:
    """Blocks in ``kv_bytes``, which were ``measured`` or follow from the settings.

    Raises:
        EngineError: not even one sequence of ``max_model_len`` would fit; the text says which length would. If the
            settings alone decide that, it is a SettingsError: trying again is useless.
    """
    num_blocks = kv_bytes // demand.block_bytes
    if num_blocks >= demand.least_blocks:
        return num_blocks
    longest = demand.longest(num_blocks)
    fits = f"the largest --max-model-len that fits is {longest}" if longest else "not one block fits"
    kind = EngineError if measured else SettingsError
    raise kind(
        f"the KV cache of {kv_bytes / GIB:.3g} GiB does not hold one sequence of {demand.max_model_len} tokens "
        f"({demand.least_blocks * demand.block_bytes / GIB:.3g} GiB): {fits}; lower --max-model-len or raise "
        f"{_kv_flag(settings, device)}"
    )


def _kv_flag(settings: Settings, device: torch.device) -> str:
    """The flag that decides how large the cache is."""
    if settings.num_gpu_blocks_override is not None:
        return "--num-gpu-blocks-override"
    if settings.kv_cache_memory_bytes is not None:
        return "--kv-cache-memory-bytes"
    return "--cpu-kv-cache-gib" if device.type == "cpu" else "--gpu-memory-utilization"
