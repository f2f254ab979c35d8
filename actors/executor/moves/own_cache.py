"""The own cache as other executors may see it: its address, and what stays open so that they can read it."""

from __future__ import annotations

import os

import torch

from pagebus.actors.executor.memory.block_parts import HeadRows
from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.actors.executor.memory.shared_memory import SharedMemory
from pagebus.actors.executor.moves.carriers.address import Address, HostTier, host_id
from pagebus.actors.executor.moves.carriers.device_blocks import DeviceBlocks
from pagebus.actors.executor.moves.carriers.errors import MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks
from pagebus.actors.executor.moves.carriers.lent_blocks import LentBlocks
from pagebus.actors.executor.moves.carriers.server import Server
from pagebus.actors.executor.moves.nixl.lender import NixlLender


class OwnCache:
    """``shared`` begins with the page that others check; on a CPU the ``blocks`` lie behind it. ``listen``: the
    address of this host on which a server sends blocks, if there is to be one. ``device``: the GPU's unique id.
    ``memory``: the host tier's, which others may read if it is shared. ``parts``: what lies where in a block. ``nixl``:
    others may read it through NIXL.

    Raises:
        OSError: the server cannot listen.
        MoveError: NIXL cannot begin.
    """

    def __init__(
        self,
        blocks: Blocks,
        shared: SharedMemory,
        device: str = "",
        listen: str | None = None,
        memory: HostMemory | None = None,
        parts: tuple[HeadRows, ...] = (),
        *,
        nixl: bool = False,
    ) -> None:
        self._shared = shared
        self.memory = memory if memory is not None and memory.shared is not None else None
        lent = LentBlocks(blocks, self.memory)
        self._server = None if listen is None else Server(listen, lent, shared.nonce)
        self._nixl = NixlLender(blocks, shared, self.memory) if nixl else None
        handle, offset = exported(blocks)
        self.address = Address(
            host=host_id(),
            pid=os.getpid(),
            file=shared.file,
            nonce=shared.nonce.hex(),
            block_bytes=blocks.block_bytes,
            num_blocks=blocks.num_blocks,
            device=device,
            handle=handle,
            offset=offset,
            name=self._server.name if self._server else "",
            port=self._server.port if self._server else 0,
            secret=self._server.secret.hex() if self._server else "",
            hosts=_host_tier(self.memory),
            parts=parts,
            nixl=self._nixl.address if self._nixl else None,
        )

    def close(self) -> None:
        """Let nobody read it any more."""
        self._shared.close()
        if self._server is not None:
            self._server.close()
        if self._nixl is not None:
            self._nixl.close()


def _host_tier(memory: HostMemory | None) -> HostTier | None:
    """Its entry in the address."""
    if memory is None or memory.shared is None:
        return None
    shared, layout = memory.shared, memory.layout
    return HostTier(
        file=shared.file, nonce=shared.nonce.hex(), num_blocks=memory.num_blocks, per_chunk=layout.per_chunk,
        stride=layout.stride,
    )  # fmt: skip


def exported(blocks: Blocks) -> tuple[str, int]:
    """The CUDA handle (hex) of the memory of a GPU, and the offset in it; "" if there is none of such memory."""
    if not isinstance(blocks, DeviceBlocks):
        return "", 0
    try:
        handle, offset = blocks.driver.export(blocks.base)
    except MoveError:
        return "", 0
    return handle.hex(), offset


def device_name(device: torch.device) -> str:
    """The unique id of a GPU; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
