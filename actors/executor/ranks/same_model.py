"""Executors of one deployment serve one model: the scheduler plans a sequence for any of them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

from pagebus.actors.model.config import CONFIG_FILE
from pagebus.actors.runtime.readiness import PATIENCE
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.contract import Bus

HEAD_BYTES = 2**20
"""Of a GGUF file, whose first bytes hold its configuration; a config.json is shorter."""
LOOK_S = 0.2


def model_digest(path: Path) -> str:
    """Tells models apart by their configuration. Hosts may have the same one in different folders."""
    with (path if path.is_file() else path / CONFIG_FILE).open("rb") as file:
        return hashlib.blake2b(file.read(HEAD_BYTES), digest_size=8).hexdigest()


class SameModel:
    """What an executor says of its model in its lease, once it is known that no other one says otherwise."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self.told: dict[str, str] = {}
        self._bus = bus
        self._deployment = settings.name
        self._patience_s = PATIENCE * settings.lease_ttl_s

    async def confirm(self, path: Path) -> None:
        """Compare with the executors that are there. The leases of a deployment that has just ended expire meanwhile.

        Raises:
            SettingsError: one serves another model.
            BusUnavailable: the bus is away.
        """
        own, began_s = await asyncio.to_thread(model_digest, path), time.monotonic()
        while other := await self._other(own):
            if time.monotonic() - began_s > self._patience_s:
                raise SettingsError(
                    f"{other} of the deployment {self._deployment!r} serves another model on this bus: give this one "
                    "another --name"
                )
            await asyncio.sleep(LOOK_S)
        self.told = {"model": own}

    async def _other(self, own: str) -> str:
        leases = await self._bus.leases("executor")
        return next((lease.name for lease in leases if lease.info.get("model", own) != own), "")
