"""Settings of the disk tier that only make sense together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagebus.actors.settings.declaring import SettingsError

if TYPE_CHECKING:
    from pagebus.actors.settings.memory import MemorySettings


def check_disk(settings: MemorySettings) -> None:
    """Check what the disk tier needs.

    Raises:
        SettingsError: it is missing.
    """
    if settings.disk_cache_dir is None:
        return
    if not settings.swap_space:
        raise SettingsError("--disk-cache-dir needs the host tier: --swap-space must be more than 0")
    if not settings.enable_prefix_caching:
        raise SettingsError("--disk-cache-dir needs --enable-prefix-caching")
