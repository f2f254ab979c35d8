"""Digests of what blocks of the cache are computed by: executors with the same digest may use each other's blocks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from pagebus.actors.executor.memory.kv_cache import CacheFormat, is_float8
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.shards.local import whole_config
from pagebus.actors.model.shards.shard import Shard
from pagebus.actors.runtime.version import version
from pagebus.actors.settings import Settings

_SETTINGS = (
    "load_format", "seed", "quantization", "calculate_kv_scales", "deterministic", "attention_backend", "spec_method",
    "spec_model", "revision",
)  # fmt: skip
"""What changes the content of blocks, besides the model, its weights, the device and the format of a block."""


def kind_of_blocks(settings: Settings, path: Path, head: Path | None, cached: CacheFormat, device: str) -> bytes:
    """Of an executor with the model in ``path``, its draft head in ``head``, and blocks of this format; ``device`` is
    the type of device that computes them. Those of ranks are of the kind of the whole model, as far as the number of
    ranks changes no more than the rounding of sums.

    Raises:
        OSError: the files of the model are not there any more.
    """
    told = [(name, getattr(settings, name, None)) for name in _SETTINGS]
    weights = [weights_of(each) for each in (path, head) if each is not None]
    calculated = is_float8(cached.dtype) and settings.calculate_kv_scales
    if not (settings.deterministic or calculated):
        other = None if cached.head is None else _whole(cached.head)
        cached = replace(cached, config=_whole(cached.config), head=other)
    return identity_of(version(), told, device, cached, weights)


def _whole(config: ModelConfig) -> ModelConfig:
    """The same for every number of ranks among which its model is divided."""
    shard = config.shard or Shard(0, 1, config.spec)
    layers = shard.whole.layers[-len(config.spec.layers) :]
    return whole_config(replace(config, shard=replace(shard, whole=replace(shard.whole, layers=layers))))


def identity_of(*described: object) -> bytes:
    """16 bytes that stand for what blocks are computed by: model, weights, settings, version."""
    return hashlib.blake2b(repr(described).encode(), digest_size=16).digest()


def weights_of(path: Path) -> list[tuple[str, int, str]]:
    """Identifies the files of a model without reading them: by names, sizes and times of the last change. In a cache of
    the hub the digest of the content takes the time's place: it is the name of the file that a link points to."""
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    told = []
    for each in files:
        real = each.resolve()
        status = real.stat()
        hashed = real.parent.name == "blobs"
        told.append((each.name, status.st_size, real.name if hashed else str(status.st_mtime_ns)))
    return told
