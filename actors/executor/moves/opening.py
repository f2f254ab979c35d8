"""Whether blocks of an executor move, and what it needs for that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.memory.kind import kind_of_blocks
from pagebus.actors.executor.memory.kv_cache import Cache, CacheFormat
from pagebus.actors.executor.memory.shared_memory import SharedMemory
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks, HostBlocks
from pagebus.actors.executor.moves.moves import Moves
from pagebus.actors.executor.moves.own_cache import OwnCache, device_name
from pagebus.actors.executor.ranks.group import own_address
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.messages import PullReport


def may_move(settings: Settings, config: ModelConfig, comm: Comm) -> bool:
    """Whether blocks may move at all: they are kept for other requests, and lie in one executor."""
    wanted = settings.kv_moves != "off" and settings.enable_prefix_caching
    return wanted and comm.size == 1 and config.stage is None and not config.in_one_step


def shares_host_tier(settings: Settings, config: ModelConfig, comm: Comm, device: torch.device) -> bool:
    """Whether others may read the host tier. Shared memory takes longer to page-lock, so a GPU's executor without
    others has none."""
    others = settings.executors > 1 or settings.kv_moves == "network"
    return may_move(settings, config, comm) and (others or device.type != "cuda")


def open_moves(
    settings: Settings, path: Path, head: Path | None, cached: CacheFormat, cache: Cache, memory: HostMemory,
    tell: Callable[[PullReport], None],
) -> Moves | None:  # fmt: skip
    """For an executor whose blocks may move; None where the system has no memory that can be shared. ``path`` and
    ``head``: the files of the model and of its draft head. ``memory``: of the host tier.

    Raises:
        SettingsError: the server cannot listen.
    """
    device = cache.blocks.device
    blocks: Blocks = HostBlocks(cache.blocks) if device.type == "cpu" else DeviceBlocks(cache.blocks)
    try:
        kind = kind_of_blocks(settings, path, head, cached, device.type)
        shared = SharedMemory(0) if device.type == "cuda" else cache.shared
    except OSError:
        return None
    if shared is None:
        return None
    network = settings.kv_moves == "network"
    listen = own_address(settings.bus) if network else None
    try:
        own = OwnCache(blocks, shared, device_name(device), listen, memory)
    except OSError as error:
        raise SettingsError(f"--kv-moves network: cannot listen on {listen}: {error}") from error
    return Moves(own, blocks, kind.hex(), tell, network=network)
