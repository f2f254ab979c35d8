"""The adapters that clients may name: read and checked here, and kept on the bus for all ingresses and jobs actors.

A request carries its adapter's path and digest, so that no other actor has to know the names. Loading a name anew
changes what later requests carry; those under way end with what they have.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import cached_property

from msgspec import convert, structs

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import AdapterFolders, digest_of
from pagebus.actors.model.lora.errors import AdapterError, NoAdapter
from pagebus.actors.model.lora.location import locate
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.combinations.lora import named_adapters
from pagebus.bus.contract import Bus, BusUnavailable
from pagebus.bus.messages import AdapterSource
from pagebus.web.http.errors import ApiError

TABLE = "adapters"
"""On the bus: one row per name. So actors that change different names at once do not undo each other's changes."""
REFRESH_S = 0.5


class AdapterRegistry:
    """The adapters by name. ``known`` is this actor's view, changed in place."""

    def __init__(self, bus: Bus, settings: Settings, known: dict[str, AdapterSource], taken: tuple[str, ...]) -> None:
        self._bus, self._settings = bus, settings
        self._known, self._taken = known, taken
        self._changing = asyncio.Lock()

    @property
    def known(self) -> Mapping[str, AdapterSource]:
        """By name, in this actor's view."""
        return self._known

    async def run(self) -> None:
        """Follow what other actors change, if adapters are enabled."""
        while self._settings.enable_lora:
            with contextlib.suppress(BusUnavailable):
                await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Take over what is on the bus."""
        async with self._changing:
            await self._refresh()

    async def load_named(self) -> None:
        """Load the adapters of ``--lora-modules``.

        Raises:
            SettingsError: one cannot be used.
        """
        for name, path in named_adapters(self._settings.lora_modules).items():
            try:
                await self.load(name, path, in_place=True)
            except ApiError as error:
                raise SettingsError(f"--lora-modules {name}={path}: {error.message}") from error

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Check an adapter, and let clients name it.

        Raises:
            ApiError: 404, there is none; 400, it cannot be used, or the name is taken.
        """
        self._check_enabled()
        if name in self._taken:
            raise _refused(f"The name '{name}' is that of the model itself.", "lora_name")
        if name in self._known and not in_place:
            raise _is_loaded(name)
        try:
            source = await asyncio.to_thread(self._read, name, path)
        except NoAdapter as error:
            raise _not_found(f"Loading lora '{name}' failed: {error}", "lora_path") from error
        except AdapterError as error:
            raise _refused(f"Loading lora '{name}' failed: {error}", "lora_path") from error
        _check_utf8(name, "lora_name")
        _check_utf8(source.path, "lora_path")
        async with self._changing:
            is_new = await self._bus.put_row(TABLE, name, structs.asdict(source), replace=in_place)
            await self._refresh()
        if not is_new and not in_place:
            raise _is_loaded(name)

    async def unload(self, name: str) -> None:
        """Let clients name it no more.

        Raises:
            ApiError: 404, there is none of this name.
        """
        self._check_enabled()
        async with self._changing:
            was_there = await self._bus.delete_row(TABLE, name)
            await self._refresh()
        if not was_there:
            raise _not_found(f"The lora adapter '{name}' cannot be found.", "lora_name")

    async def _refresh(self) -> None:
        found = convert(await self._bus.get_rows(TABLE), dict[str, AdapterSource])
        if found != self._known:
            self._known.clear()
            self._known.update(sorted(found.items()))

    @cached_property
    def _folders(self) -> AdapterFolders:
        config = ModelConfig.of(self._settings)
        return AdapterFolders(config, self._settings.max_lora_rank, self._settings.lora_target_modules)

    def _read(self, name: str, path: str) -> AdapterSource:
        found = locate(path)
        adapter = self._folders.open(found.folder)
        return AdapterSource(name=name, path=found.repository or str(adapter.folder), digest=digest_of(adapter))

    def _check_enabled(self) -> None:
        if not self._settings.enable_lora:
            raise _refused("This server was not started with --enable-lora.")


def _check_utf8(text: str, field: str) -> None:
    """Names of files may be any bytes; messages hold text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refused(f"{text!r} is not UTF-8.", field) from error


def _is_loaded(name: str) -> ApiError:
    text = "If you want to load the adapter in place, set 'load_inplace' to True."
    return _refused(f"The lora adapter '{name}' has already been loaded. {text}", "lora_name")


def _refused(text: str, field: str | None = None) -> ApiError:
    return ApiError(400, text, param=field, type="BadRequestError", code="invalid_adapter")


def _not_found(text: str, field: str) -> ApiError:
    return ApiError(404, text, param=field, type="NotFoundError")
