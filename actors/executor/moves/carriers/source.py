"""Another executor's cache, by whichever carriers lead there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.moves.carriers.address import Address, host_id
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.device_memory import DeviceMemory
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks, HostBlocks
from pagebus.actors.executor.moves.carriers.locked_file import LockedFile
from pagebus.actors.executor.moves.carriers.network import Network
from pagebus.actors.executor.moves.carriers.own_hosts import OwnHosts
from pagebus.actors.executor.moves.carriers.shared_file import SharedFile, is_there
from pagebus.bus.messages import Int32Array


class Carrier(Protocol):
    """One way to blocks of a cache or of a host tier."""

    def prepare(self, sources: Int32Array) -> None:
        """What has to be done once before such blocks can be copied, and takes long.

        Raises:
            MoveError: they cannot be.
        """
        ...

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
    """The cache of an ``address``, and its host tier. One thread uses it. ``memory``: if both are one's own, that of
    the host tier."""

    def __init__(self, address: Address, own: Blocks, *, network: bool, memory: HostMemory | None = None) -> None:
        self._address, self._own = address, own
        self._is_near = address.host == host_id() != ""
        self._carriers = {
            False: list(_carriers(address, own, near=self._is_near, network=network)),
            True: _host_carriers(address, own, memory, near=self._is_near, network=network),
        }

    def prepare(self, sources: Int32Array, *, hosts: bool = False) -> None:
        """Do what takes long before the first copy of such blocks. What fails shows there."""
        for carrier in self._carriers[hosts]:
            with contextlib.suppress(MoveError):
                carrier.prepare(sources)
                return

    def copy(self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool], *, hosts: bool = False) -> None:
        """Copy by the first carrier that can. ``hosts``: blocks of the host tier.

        Raises:
            MoveError: none can; the text says why.
        """
        self._check(sources, hosts=hosts)
        problems = []
        for carrier in self._carriers[hosts]:
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
        for carrier in self._carriers[False] + self._carriers[True]:
            carrier.close()

    def _check(self, sources: Int32Array, *, hosts: bool) -> None:
        address = self._address
        if address.block_bytes != self._own.block_bytes:
            raise MoveError(f"the source's blocks have {address.block_bytes} bytes, ours {self._own.block_bytes}")
        most = address.num_blocks
        if hosts:
            most = 0 if address.hosts is None else address.hosts.num_blocks
        if len(sources) and int(sources.max()) >= most:
            raise MoveError(f"block {int(sources.max())} is asked for, the source has {most}")


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


def _host_carriers(
    address: Address, own: Blocks, memory: HostMemory | None, *, near: bool, network: bool
) -> list[Carrier]:
    """The same for blocks of the host tier."""
    found: list[Carrier] = []
    hosts = address.host_tier()
    if memory is not None:
        return [OwnHosts(memory, own)]
    if hosts is None:
        return found
    if near and isinstance(own, DeviceBlocks):
        found.append(LockedFile(hosts, own))
    if near:
        found.append(SharedFile(hosts, own))
    if network and address.port:
        found.append(Network(address, own, first=address.num_blocks))
    return found
