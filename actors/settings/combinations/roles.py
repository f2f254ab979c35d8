"""``--roles``: which executors compute long prompts, and which go on with them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pagebus.actors.settings.declaring import SettingsError

if TYPE_CHECKING:
    from pagebus.actors.settings.memory import MemorySettings

_ROLES = re.compile(r"prefill=([1-9]\d{0,3}),decode=([1-9]\d{0,3})")


AUTO = "auto"
"""As many as the load suggests."""


def check_roles(roles: str, executors: int, memory: MemorySettings) -> None:
    """Roles are of executors that are there, and can pull blocks from each other.

    Raises:
        SettingsError: they are not.
    """
    found = _ROLES.fullmatch(roles)
    if found is None and roles != AUTO:
        raise SettingsError(f"--roles {roles!r}: it is {AUTO}, or of the form prefill=1,decode=3")
    count = sum(map(int, found.groups())) if found else executors
    if count != executors:
        raise SettingsError(f"--roles {roles}: these are {count} executors, but --executors is {executors}")
    if memory.kv_moves == "off" or not memory.enable_prefix_caching:
        raise SettingsError("--roles: executors have to pull blocks: not with --kv-moves off or without prefix caching")


def num_prefill(roles: str | None) -> int:
    """How many executors compute prompts by a checked ``--roles``; 0: there are no roles, or none at first."""
    found = _ROLES.fullmatch(roles) if roles else None
    return int(found[1]) if found else 0
