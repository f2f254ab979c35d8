"""Whether an executor has a disk tier, and which files it uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagebus.actors.executor.memory.disk_files import DiskFiles
from pagebus.actors.executor.memory.disk_place import identity_of, take_place, weights_of
from pagebus.actors.executor.memory.disk_tier import DiskTier
from pagebus.actors.executor.memory.host_memory import GIB, HostMemory
from pagebus.actors.executor.memory.kv_cache import CacheFormat
from pagebus.actors.runtime.version import version
from pagebus.actors.settings import Settings
from pagebus.bus.messages import DiskReport

PAGE_BYTES = 4096
"""What a file takes is rounded up to."""
_SETTINGS = (
    "load_format", "seed", "quantization", "calculate_kv_scales", "deterministic", "attention_backend", "spec_method",
    "spec_model", "device", "revision",
)  # fmt: skip
"""What changes the content of blocks, besides the model, its weights and the format of a block."""


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
    told = [(name, getattr(settings, name, None)) for name in _SETTINGS]
    try:
        weights = [weights_of(each) for each in (path, head) if each is not None]
        identity = identity_of(version(), told, cached, weights)
        place = take_place(Path(settings.disk_cache_dir).expanduser(), identity)
        return DiskTier(DiskFiles(place, memory.block_bytes, identity), memory, num_blocks, tell)
    except OSError as error:
        text = f"no disk tier: {error}"
        tell(DiskReport(replica="", executor_epoch=0, scheduler_epoch=0, error=text))
        return None
