"""The layout of a block of one rank's cache: the heads of keys and values that the rank holds, in all layers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch

from pagebus.actors.executor.memory.kv_cache import CacheFormat, kv_parts, page_layers
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.common.int8 import SCALE_BYTES


class HeadRows(msgspec.Struct, frozen=True, array_like=True):
    """A part of a block: ``rows`` rows of ``count`` heads, each of ``head_bytes`` bytes; the first of them is the
    model's head ``first``."""

    rows: int
    head_bytes: int
    first: int
    count: int

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return self.rows * self.count * self.head_bytes


def block_parts(cached: CacheFormat) -> tuple[HeadRows, ...]:
    """The parts of a block, in order and without gaps: the model's, then its draft head's. Empty where nothing is
    cached."""
    if cached.config.in_one_step:
        return ()
    parts = [*_parts_of(cached.config, cached.block_size, cached.dtype)]
    if cached.head is not None:
        parts += _parts_of(cached.head, cached.block_size, cached.head_dtype)
    return tuple(parts)


def _parts_of(config: ModelConfig, block_size: int, dtype: torch.dtype) -> Iterator[HeadRows]:
    heads, layers = _kv_heads(config), page_layers(config)
    rows = layers * kv_parts(config) * block_size
    yield HeadRows(rows, config.head_dim * dtype.itemsize, heads.start, len(heads))
    if dtype == torch.int8:
        yield HeadRows(layers, block_size * SCALE_BYTES, heads.start, len(heads))


def _kv_heads(config: ModelConfig) -> range:
    """The model's heads of keys and values that this rank holds. Latents of latent attention are on all ranks."""
    shard = config.shard
    if shard is None or not shard.divides_layers:
        return range(config.num_kv_heads)
    return shard.kv_heads(shard.whole.layers[0].mixer)
