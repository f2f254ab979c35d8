"""Another executor's cache, by whichever carriers lead there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from pagebus.actors.executor.device.promises import Early
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
from pagebus.actors.executor.moves.nixl.carrier import nixl_carriers
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
        self._carriers = _near_carriers(address, own) if self._is_near else {False: [], True: []}
        if network:
            for hosts, found in _far_carriers(address, own).items():
                self._carriers[hosts] += found
        if memory is not None:
            self._carriers[True] = [OwnHosts(memory, own)]

    def prepare(self, sources: Int32Array, *, hosts: bool = False) -> None:
        """Do what takes long before the first copy of such blocks. What fails shows there."""
        for carrier in self._carriers[hosts]:
            with contextlib.suppress(MoveError):
                carrier.prepare(sources)
                return

    def copy(
        self, sources: Int32Array, targets: Int32Array, stop: Callable[[], bool], *, hosts: bool = False,
        early: Early | None = None,
    ) -> None:  # fmt: skip
        """Copy by the first carrier that can. ``hosts``: blocks of the host tier. ``early``: what may be told before
        the blocks are there.

        Raises:
            MoveError: none can; the text says why.
        """
        self._check(sources, hosts=hosts)
        problems = []
        for carrier in self._carriers[hosts]:
            try:
                if isinstance(carrier, DeviceMemory):
                    carrier.copy(sources, targets, stop, early)
                else:
                    carrier.copy(sources, targets, stop)
                return
            except Abandoned:
                raise
            except MoveError as error:
                if early is not None and early.is_told:
                    raise
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


Carriers = dict[bool, list[Carrier]]
"""Those that may lead to blocks of the host tier (True) and of the cache (False), the fastest first."""


def _near_carriers(address: Address, own: Blocks) -> Carriers:
    """Of one host."""
    found: Carriers = {False: [], True: []}
    hosts = address.host_tier()
    if isinstance(own, HostBlocks) and not address.device:
        found[False].append(SharedFile(address, own))
    if isinstance(own, DeviceBlocks) and address.handle:
        found[False].append(DeviceMemory(address, own))
    if hosts is not None:
        found[True] += [LockedFile(hosts, own)] if isinstance(own, DeviceBlocks) else []
        found[True].append(SharedFile(hosts, own))
    return found


def _far_carriers(address: Address, own: Blocks) -> Carriers:
    """Between hosts."""
    cache, tier = nixl_carriers(address, own)
    found: Carriers = {False: [*cache], True: [*tier]}
    if address.port:
        found[False].append(Network(address, own))
        if address.hosts is not None:
            found[True].append(Network(address, own, first=address.num_blocks))
    return found
