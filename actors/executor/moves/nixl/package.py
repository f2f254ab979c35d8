"""NIXL's package, which need not be there: ``pip install 'pagebus[nixl]'``. Its agents, as far as pulls need them."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.executor.moves.carriers.errors import MoveError

MODULES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The first one chooses between the others by torch's CUDA."""
MISSING = "needs NVIDIA's NIXL: pip install 'pagebus[nixl]'"
HOST, DEVICE = "DRAM", "VRAM"
_LOGS = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
"""What NIXL and UCX write to stdout, unless somebody wants more."""

Pieces = NDArray[np.uint64]
"""[n, 3]: address, bytes, number of the GPU."""


class Handle(Protocol):
    """A transfer."""

    def release(self) -> None:
        """Give it back. Bytes that are on their way may come all the same."""
        ...


class Agent(Protocol):
    """What NIXL calls so: memory that is registered, and connections."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> object:
        """Pieces of memory: address, bytes, number of the GPU, a name."""
        ...

    def get_agent_metadata(self) -> bytes:
        """What others need to read this memory."""
        ...

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Connect. Returns the other one's name."""
        ...

    def get_xfer_descs(self, descs: Pieces, mem_type: str) -> object:
        """Pieces of registered memory."""
        ...

    def initialize_xfer(self, operation: str, local: object, remote: object, name: bytes) -> Handle:
        """Prepare a transfer."""
        ...

    def transfer(self, handle: Handle) -> str:
        """Begin it; returns what ``check_xfer_state`` does."""
        ...

    def check_xfer_state(self, handle: Handle) -> str:
        """DONE, PROC or ERR."""
        ...


def is_installed() -> bool:
    """Whether one of the packages is there."""
    return any(find_spec(name) is not None for name in MODULES)


def open_agent(name: str) -> Agent:
    """An agent with threads of its own. It, and its connections, are gone once nothing refers to it.

    Raises:
        MoveError: NIXL is not there, or cannot begin here.
    """
    for key, value in _LOGS.items():
        os.environ.setdefault(key, value)
    try:
        api = _api()
        return cast("Agent", api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"])))
    except Exception as error:  # of a library that is loaded, or of its own kinds
        raise MoveError(f"NIXL cannot begin: {type(error).__name__}: {error}") from error


def _api() -> Any:
    for name in MODULES:
        if find_spec(name) is not None:
            return import_module(f"{name}._api")
    raise MoveError(MISSING)
