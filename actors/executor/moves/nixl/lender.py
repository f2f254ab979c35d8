"""The own cache and host tier, registered with NIXL, so that others can read them."""

from __future__ import annotations

import base64

import numpy as np

from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.memory.shared_memory import HEADER_BYTES, SharedMemory
from pagebus.actors.executor.moves.carriers.address import NixlAddress
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.actors.executor.moves.nixl.package import DEVICE, HOST, Agent, open_agent
from pagebus.actors.executor.moves.nixl.regions import place_of


class NixlLender:
    """``shared``, ``blocks`` and ``memory`` as of :class:`~pagebus.actors.executor.moves.own_cache.OwnCache`.

    Raises:
        MoveError: NIXL is not there, or refuses the memory.
    """

    def __init__(self, blocks: Blocks, shared: SharedMemory, memory: HostMemory | None) -> None:
        agent = open_agent(f"lender-{shared.nonce.hex()}")
        page, place = _register(agent, shared), place_of(blocks)
        if isinstance(blocks, DeviceBlocks):
            agent.register_memory([(place.base, place.num_bytes, place.gpu, "")], DEVICE)
        hosts = None if memory is None else memory.shared
        self.address = NixlAddress(
            page=page,
            base=place.base,
            gpu=place.gpu,
            hosts_page=0 if hosts is None else _register(agent, hosts),
            hosts_base=0 if memory is None else memory.address,
            agent=base64.b64encode(agent.get_agent_metadata()).decode(),
        )
        self._agent: Agent | None = agent

    def close(self) -> None:
        """Let nobody read it any more."""
        self._agent = None


def _register(agent: Agent, shared: SharedMemory) -> int:
    """The page and what lies behind it. Returns where it begins."""
    page = int(np.frombuffer(shared.map, np.uint8, count=HEADER_BYTES).ctypes.data)
    agent.register_memory([(page, len(shared.map), 0, "")], HOST)
    return page
