"""Another executor's cache, by whichever carriers lead there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pagebus.actors.executor.moves.carriers.address import Address, host_id
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.device_memory import DeviceMemory
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks, HostBlocks
from pagebus.actors.executor.moves.carriers.network import Network
from pagebus.actors.executor.moves.carriers.shared_file import SharedFile, is_there
from pagebus.bus.messages import Int32Array


class Carrier(Protocol):
    """One way to a cache."""

    def copy(self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool]) -> None:
        """Copy blocks into the own cache, and wait until they are there. ``stop`` says whether nobody waits for them
        any more.

        Raises:
            MoveError: they are not there.
        """
        ...

    def close(self) -> None:
        """Give up what is open; the next pull may open it again."""
        ...


class Source:
    """The cache of an ``address``. One thread uses it."""

    def __init__(self, address: Address, own: Blocks, *, network: bool) -> None:
        self._address, self._own = address, own
        self._is_near = address.host == host_id() != ""
        self._carriers = list(_carriers(address, own, near=self._is_near, network=network))

    def copy(self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool]) -> None:
        """Copy by the first carrier that can.

        Raises:
            MoveError: none can; the text says why.
        """
        self._check(sources)
        problems = []
        for carrier in self._carriers:
            try:
                carrier.copy(sources, targets, stop)
                return
            except Abandoned:
                raise
            except MoveError as error:
                problems.append(str(error))
        raise MoveError("; ".join(problems) or "there is no way to the source's cache from here")

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended, as far as that can be seen from here."""
        return self._is_near and not is_there(self._address)

    def close(self) -> None:
        """Give up what is open."""
        for carrier in self._carriers:
            carrier.close()

    def _check(self, sources: Int32Array) -> None:
        address = self._address
        if address.block_bytes != self._own.block_bytes:
            raise MoveError(f"the source's blocks have {address.block_bytes} bytes, ours {self._own.block_bytes}")
        if len(sources) and int(sources.max()) >= address.num_blocks:
            raise MoveError(f"block {int(sources.max())} is asked for, the source has {address.num_blocks}")


def _carriers(address: Address, own: Blocks, *, near: bool, network: bool) -> list[Carrier]:
    """Those that may lead there, the fastest first."""
    found: list[Carrier] = []
    if near and isinstance(own, HostBlocks) and not address.device:
        found.append(SharedFile(address, own))
    if near and isinstance(own, DeviceBlocks) and address.handle:
        found.append(DeviceMemory(address, own))
    if network and address.port:
        found.append(Network(address, own))
    return found
