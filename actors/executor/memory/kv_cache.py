"""The paged key-value cache: one tensor, block-major, so that a block of all layers is one contiguous piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagebus.actors.executor.memory.shared_memory import SharedMemory, try_shared
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.common import int8
from pagebus.kernels.common.float8 import FLOAT8

UNUSED_NUMBERS = 16
"""Of a block of a model that caches nothing: the scheduler counts blocks all the same, which hold up no sequence."""


def is_float8(dtype: torch.dtype) -> bool:
    """Whether a cache of this format holds quotients by a scale that a layer's head has for all tokens."""
    return dtype in FLOAT8


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of ``block_size`` tokens in all layers, or in those of a page
    (:class:`pagebus.actors.model.cache_groups.CacheGroups`), and their scales in int8."""
    if config.in_one_step:
        return UNUSED_NUMBERS * dtype.itemsize
    if dtype == torch.int8:
        return int8.block_bytes(page_layers(config), block_size, config.num_kv_heads, config.head_dim)
    numbers = config.spec.kv_numbers() // config.num_layers * page_layers(config)  # layers do not differ in heads
    return block_size * numbers * dtype.itemsize


def page_layers(config: ModelConfig) -> int:
    """Layers of which a block of the cache holds keys and values."""
    return config.cache_groups.page_layers


def kv_parts(config: ModelConfig) -> int:
    """Tensors of a layer in a block."""
    return config.spec.layers[0].mixer.kv_parts


def blocks_needed(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks for ``max_num_seqs`` sequences of ``max_model_len`` tokens at once; more only serve prefix hits."""
    return max_num_seqs * -(-max_model_len // block_size)


def allocate_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros [num_blocks, layers of a block, 2, block_size, kv_heads, head_dim]; [:, place, 0] are a layer's keys, 1 its
    values. In int8 [num_blocks, bytes], with scales of 1 behind the numbers: kernels take their logarithms. Of latents
    there is 1 part in place of 2. See `layer_pages`.

    Zeros, because what is masked is still multiplied, and garbage may be NaN. On a CPU the pages are only taken from
    the system when they are first written.
    """
    return _shaped(_zeros(num_blocks, kv_block_bytes(config, block_size, dtype), device), config, block_size, dtype)


@dataclass(frozen=True, slots=True)
class Cache:
    """``blocks`` [num_blocks, ...] are contiguous, and copied as they are. In each of them lie keys and values of the
    ``model``, and those of its draft ``head``, if it has one: views as of :func:`allocate_kv_cache`. ``shared`` is the
    memory they lie in, if other processes may read it."""

    blocks: torch.Tensor
    model: torch.Tensor
    head: torch.Tensor | None = None
    shared: SharedMemory | None = None


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The content of a block: keys and values of ``block_size`` tokens, the model's in ``dtype`` and those of its draft
    ``head``, if it has one, in ``head_dtype``."""

    config: ModelConfig
    block_size: int
    dtype: torch.dtype
    head: ModelConfig | None
    head_dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Of both."""
        own = kv_block_bytes(self.config, self.block_size, self.dtype)
        return own + (0 if self.head is None else kv_block_bytes(self.head, self.block_size, self.head_dtype))

    def allocate(self, num_blocks: int, device: torch.device, *, shared: bool = False) -> Cache:
        """Zeros, see :func:`allocate_kv_cache`. ``shared``: on a CPU, where other processes may read them, if the
        system has such memory."""
        memory = try_shared(num_blocks * self.block_bytes) if shared and device.type == "cpu" else None
        own = kv_block_bytes(self.config, self.block_size, self.dtype)
        if memory is None:
            blocks = _zeros(num_blocks, self.block_bytes, device)
        else:
            blocks = torch.from_numpy(memory.bytes).view(num_blocks, self.block_bytes)
        if self.head is None:
            cache = _shaped(blocks, self.config, self.block_size, self.dtype)
            return Cache(cache, cache, shared=memory)
        model = _shaped(blocks[:, :own], self.config, self.block_size, self.dtype)
        return Cache(blocks, model, _shaped(blocks[:, own:], self.head, self.block_size, self.head_dtype), memory)


def _zeros(num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_blocks * block_bytes, dtype=np.uint8)).view(num_blocks, block_bytes)


def _shaped(blocks: torch.Tensor, config: ModelConfig, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros [num_blocks, bytes] as a cache."""
    numbers = blocks.view(dtype)
    if config.in_one_step:
        return numbers
    if dtype == torch.int8:
        if blocks.device.type != "cpu":
            int8.split_blocks(numbers, page_layers(config), config.num_kv_heads, config.head_dim)[1].fill_(1.0)
        return numbers
    shape = page_layers(config), kv_parts(config), block_size, config.num_kv_heads, config.head_dim
    return numbers.view(len(numbers), *shape)


def layer_pages(
    kv_cache: torch.Tensor, place: int, config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values [num_blocks, block_size, Hkv, D] of the layer at this place of the cache's blocks; in int8 with
    their scales [2, num_blocks, block_size, Hkv]. Of latents, values are the first numbers of keys."""
    if config.latent is not None:
        entries = kv_cache[:, place, 0]
        return entries, entries[..., : config.latent.kv_rank], None
    if kv_cache.dtype != torch.int8:
        return kv_cache[:, place, 0], kv_cache[:, place, 1], None
    numbers, scales = int8.split_blocks(kv_cache, page_layers(config), config.num_kv_heads, config.head_dim)
    return numbers[:, place, 0], numbers[:, place, 1], scales[place]
