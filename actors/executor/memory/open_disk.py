"""Whether an executor has a disk tier, and which files it uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagebus.actors.executor.memory.disk_files import DiskFiles
from pagebus.actors.executor.memory.disk_place import take_place
from pagebus.actors.executor.memory.disk_tier import DiskTier
from pagebus.actors.executor.memory.host_memory import GIB, HostMemory
from pagebus.actors.executor.memory.kind import kind_of_blocks
from pagebus.actors.executor.memory.kv_cache import CacheFormat
from pagebus.actors.settings import Settings
from pagebus.bus.messages import DiskReport

PAGE_BYTES = 4096
"""The room that a file takes is a multiple of this."""


def open_disk(
    settings: Settings, path: Path, head: Path | None, cached: CacheFormat, memory: HostMemory,
    tell: Callable[[DiskReport], None],
) -> DiskTier | None:  # fmt: skip
    """The disk tier, if there is to be one and the folder can be used; if not, ``tell`` is told why. ``path`` and
    ``head``: the files of the model and of its draft head.

    Raises:
        SettingsError: the folder is not this user's alone.
    """
    if settings.disk_cache_dir is None or not memory.num_blocks:
        return None
    file_bytes = -(-memory.block_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
    num_blocks = int(settings.disk_cache_gib * GIB // file_bytes)
    try:
        identity = kind_of_blocks(settings, path, head, cached, memory.device.type)
        place = take_place(Path(settings.disk_cache_dir).expanduser(), identity)
        files = DiskFiles(place, memory.block_bytes, identity)
        try:
            return DiskTier(files, memory, num_blocks, tell)
        except OSError:
            files.close()
            raise
    except OSError as error:
        text = f"no disk tier: {error}"
        tell(DiskReport(replica="", executor_epoch=0, scheduler_epoch=0, error=text))
        return None
