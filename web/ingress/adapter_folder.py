"""A folder of adapters (``--lora-resolver-cache-dir``): what lies in it is served, by the names of its folders.

It is looked at, not listened to: shared file systems tell of no changes. An adapter is read when its files have been
the same for two looks, so that one that is being copied is not taken for a broken one. Every ingress looks for itself;
what they load is the same, and the names lie on the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pagebus.actors.model.lora.adapter import CONFIG, WEIGHTS
from pagebus.actors.settings import SettingsError
from pagebus.bus.contract import BusUnavailable
from pagebus.bus.messages import AdapterSource
from pagebus.web.http.errors import ApiError
from pagebus.web.http.limits import MAX_NAME_CHARS

LOOK_S = 0.5
Stamp: TypeAlias = tuple[tuple[int, int, int], ...]
"""Of both files of an adapter: inode, time of the last change in nanoseconds, bytes."""


class Names(Protocol):
    """What an adapter folder needs of :class:`pagebus.web.ingress.adapter_registry.AdapterRegistry`."""

    @property
    def known(self) -> Mapping[str, AdapterSource]: ...
    async def load(self, name: str, path: str, *, in_place: bool) -> None: ...
    async def unload(self, name: str) -> None: ...


class AdapterFolder:
    """The adapters in ``folder``.

    Raises:
        SettingsError: there is no such folder.
    """

    def __init__(self, folder: str, names: Names, log: Any) -> None:
        try:
            self._folder = Path(folder).resolve(strict=True)
            stamps_in(self._folder)
        except OSError as error:
            raise SettingsError(f"--lora-resolver-cache-dir {folder}: {error.strerror}") from error
        self._names, self._log = names, log
        self._seen: dict[str, Stamp] = {}
        """What the last look saw."""
        self._tried: dict[str, Stamp] = {}
        """What is served, or was refused: neither is tried again before it changes."""

    async def run(self) -> None:
        """Look for ever. What is there already was copied long ago."""
        self._seen = await asyncio.to_thread(stamps_in, self._folder)
        while True:
            with contextlib.suppress(BusUnavailable, OSError):  # looked at again soon
                await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Load what is new or has changed, and lies still; unload what is gone.

        Raises:
            BusUnavailable: what is left is done by the next look.
            OSError: the folder cannot be read.
        """
        stamps = await asyncio.to_thread(stamps_in, self._folder)
        still = {name: stamp for name, stamp in stamps.items() if self._seen.get(name) == stamp}
        self._seen = stamps
        for name in [name for name in self._names.known if name not in stamps and self._is_own(name)]:
            await self._unload(name)
        for name, stamp in still.items():
            if self._tried.get(name) != stamp:
                await self._load(name)
                self._tried[name] = stamp

    def _is_own(self, name: str) -> bool:
        """Whether a name was loaded from here, by this server or by one before it."""
        return name in self._tried or Path(self._names.known[name].path) == self._folder / name

    async def _load(self, name: str) -> None:
        try:
            await self._names.load(name, str(self._folder / name), in_place=True)
        except ApiError as error:
            self._log.error("adapter refused", adapter=name, reason=error.message)
        else:
            self._log.info("adapter loaded", adapter=name)

    async def _unload(self, name: str) -> None:
        with contextlib.suppress(ApiError):  # another ingress was first
            await self._names.unload(name)
        self._tried.pop(name, None)
        self._log.info("adapter unloaded", adapter=name)


def stamps_in(folder: Path) -> dict[str, Stamp]:
    """Of all adapters that lie in ``folder``, by name. Raises OSError."""
    stamps = {}
    for each in sorted(folder.iterdir()):
        if each.name.startswith(".") or len(each.name) > MAX_NAME_CHARS:
            continue
        with contextlib.suppress(OSError):  # no folder, none of an adapter, or half of one
            found = [(each / name).stat() for name in (CONFIG, WEIGHTS)]
            stamps[each.name] = tuple((file.st_ino, file.st_mtime_ns, file.st_size) for file in found)
    return stamps
