"""Decides whether blocks of an executor may move, and opens what that needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.memory.block_parts import block_parts
from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.memory.kind import kind_of_blocks
from pagebus.actors.executor.memory.kv_cache import Cache, CacheFormat
from pagebus.actors.executor.memory.shared_memory import try_shared
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.errors import MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks, HostBlocks
from pagebus.actors.executor.moves.group import meet
from pagebus.actors.executor.moves.moves import Moves
from pagebus.actors.executor.moves.nixl.package import MISSING, is_installed
from pagebus.actors.executor.moves.own_cache import OwnCache, device_name
from pagebus.actors.executor.ranks.group import own_address
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.messages import PullReport

FAR = ("network", "nixl")
"""Values of ``--kv-moves`` with which blocks also go to other hosts."""


def may_move(settings: Settings, config: ModelConfig) -> bool:
    """Whether blocks may move at all: they are kept for other requests, and have all layers."""
    wanted = settings.kv_moves != "off" and settings.enable_prefix_caching
    return wanted and config.stage is None and not config.in_one_step


def shares_host_tier(settings: Settings, config: ModelConfig, device: torch.device) -> bool:
    """Whether others may read the host tier. Shared memory takes longer to page-lock, so a GPU's executor without
    others has none.

    Raises:
        SettingsError: NIXL is asked for, and not there.
    """
    if settings.kv_moves == "nixl" and not is_installed():
        raise SettingsError(f"--kv-moves nixl {MISSING}")
    others = settings.executors > 1 or settings.kv_moves in FAR
    return may_move(settings, config) and (others or device.type != "cuda")


def open_moves(
    settings: Settings, path: Path, head: Path | None, cached: CacheFormat, cache: Cache, memory: HostMemory,
    comm: Comm, tell: Callable[[PullReport], None],
) -> Moves | None:  # fmt: skip
    """For an executor whose blocks may move, or one of its ranks, which ``comm`` connects with the others; None where
    the system has no memory that can be shared. ``path`` and ``head``: the files of the model and of its draft head.
    ``memory``: of the host tier.

    Raises:
        SettingsError: the server cannot listen, or NIXL cannot begin.
        EngineError: a rank is lost.
    """
    device = cache.blocks.device
    blocks: Blocks = HostBlocks(cache.blocks) if device.type == "cpu" else DeviceBlocks(cache.blocks)
    own, kind = _own_cache(settings, cached, cache, blocks, memory), ""
    with suppress(OSError):
        kind = kind_of_blocks(settings, path, head, cached, device.type).hex()
    group = meet(own.address if own is not None and kind else None, kind, comm)
    if group is not None and own is not None:
        return Moves(own, blocks, group, tell, network=settings.kv_moves in FAR)
    if own is not None:
        own.close()
    return None


def _own_cache(
    settings: Settings, cached: CacheFormat, cache: Cache, blocks: Blocks, memory: HostMemory
) -> OwnCache | None:
    """As others may see it; None if they cannot. Raises SettingsError if the server cannot listen, or NIXL cannot
    begin."""
    device = cache.blocks.device
    shared = try_shared(0) if device.type == "cuda" else cache.shared
    if shared is None:
        return None
    listen = own_address(settings.bus) if settings.kv_moves == "network" else None
    try:
        name, nixl = device_name(device), settings.kv_moves == "nixl"
        return OwnCache(blocks, shared, name, listen, memory, block_parts(cached), nixl=nixl)
    except OSError as error:
        raise SettingsError(f"--kv-moves network: cannot listen on {listen}: {error}") from error
    except MoveError as error:
        raise SettingsError(f"--kv-moves nixl: {error}") from error
