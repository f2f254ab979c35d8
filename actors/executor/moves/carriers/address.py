"""The address of a cache, as an executor's lease tells it: compact JSON, which only executors read."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec.structs import replace

from pagebus.actors.executor.memory.block_parts import HeadRows
from pagebus.actors.executor.memory.layout import Layout
from pagebus.actors.executor.moves.carriers.errors import MoveError

_BOOT, _PROCESSES = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"


class HostTier(msgspec.Struct, frozen=True, kw_only=True):
    """``num_blocks`` blocks in host memory, behind the page of file number ``file``, in chunks as of
    :class:`~pagebus.actors.executor.memory.layout.Layout`."""

    file: int
    nonce: str
    num_blocks: int
    per_chunk: int
    stride: int


class NixlAddress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What NIXL needs to know of an executor: its ``agent``'s metadata (base64), the addresses of the page and of the
    first block, in memory of the process's GPU number ``gpu``, and those of the host tier."""

    agent: str
    page: int
    base: int
    gpu: int = 0
    hosts_page: int = 0
    hosts_base: int = 0


class Address(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where ``num_blocks`` blocks of ``block_bytes`` bytes lie.

    A process of the same ``host`` finds, as file number ``file`` of process ``pid``, a page that begins with ``nonce``
    (hex). On a CPU the blocks follow it. On a GPU they begin at byte ``offset`` of the allocation that the CUDA
    ``handle`` (hex) stands for. A server at ``name`` and ``port`` sends blocks to processes that know the ``secret``
    (hex).
    """

    host: str
    pid: int
    file: int
    nonce: str
    block_bytes: int
    num_blocks: int
    device: str = ""
    """The GPU's unique id; of a CPU's cache empty."""
    handle: str = ""
    offset: int = 0
    name: str = ""
    port: int = 0
    secret: str = ""
    per_chunk: int = 0
    stride: int = 0
    """The layout of the blocks behind the page, as in ``HostTier``."""
    hosts: HostTier | None = None
    """The executor's host tier, if others may read it."""
    parts: tuple[HeadRows, ...] = ()
    """The layout of a block."""
    nixl: NixlAddress | None = None
    """How NIXL reads it, if it may."""
    others: tuple[Address, ...] = ()
    """If this is the first rank of an executor of several: the addresses of the others, which hold other parts of the
    same blocks."""

    @property
    def ranks(self) -> tuple[Address, ...]:
        """Of each rank."""
        return (replace(self, others=()), *self.others)

    @property
    def layout(self) -> Layout:
        """The layout of the blocks behind the page."""
        return Layout(self.block_bytes, self.per_chunk, self.stride)

    def host_tier(self) -> Address | None:
        """The address of the host tier's blocks behind their page. It does not lead to them through a server."""
        if self.hosts is None:
            return None
        hosts = self.hosts
        return replace(
            self, file=hosts.file, nonce=hosts.nonce, num_blocks=hosts.num_blocks, per_chunk=hosts.per_chunk,
            stride=hosts.stride, device="", handle="", offset=0, port=0, hosts=None,
        )  # fmt: skip

    def text(self) -> str:
        """The form in the lease."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> Address:
        """From the lease.

        Raises:
            MoveError: it is not an address.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise MoveError(f"the source's address cannot be read: {error}") from error


def host_id() -> str:
    """Equal for processes that can open each other's files by number: one boot, one space of process ids, one user.
    Empty if the system does not say."""
    try:
        return f"{_BOOT.read_text().strip()}/{os.stat(_PROCESSES).st_ino}/{os.geteuid()}"
    except OSError:
        return ""
