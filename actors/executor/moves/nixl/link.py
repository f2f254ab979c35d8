"""Reads memory of another executor through NIXL, piece by piece, in the thread that pulls.

The agent is this link's own. NIXL gives back a transfer whose bytes are still on their way, and they are written later.
Only without the agent nobody writes. So whatever goes wrong in the middle ends it, and the next read opens another.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from pagebus.actors.executor.memory.shared_memory import NONCE_BYTES
from pagebus.actors.executor.moves.carriers import wire
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.carriers.host_blocks import Blocks, HostBlocks
from pagebus.actors.executor.moves.nixl import package
from pagebus.actors.executor.moves.nixl.package import DEVICE, HOST, Agent, Handle, Pieces
from pagebus.actors.executor.moves.nixl.regions import place_of

AT_A_TIME = 2
"""Transfers on their way: one comes while the next one is asked for."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.00005, 0.001
"""Pauses between two looks whether a transfer is over. They grow."""

Wanted = tuple[Pieces, Pieces]
"""(pieces of the source, pieces of the own memory)."""


class Link:
    """To the memory that an agent's ``metadata`` (base64) tells of, from one's ``own`` blocks."""

    def __init__(self, metadata: str, own: Blocks, timeout_s: float = wire.TIMEOUT_S) -> None:
        self._metadata, self._own, self._timeout_s = metadata, own, timeout_s
        self._kind = HOST if isinstance(own, HostBlocks) else DEVICE
        self._nonce = np.zeros(NONCE_BYTES, np.uint8)
        self._agent: Agent | None = None
        self._name = b""
        self._flying: deque[Handle] = deque()

    def page(self, address: int, stop: Callable[[], bool]) -> str:
        """The number (hex) that a page of the source begins with.

        Raises:
            MoveError: it cannot be read.
        """
        self._nonce[:] = 0
        source, target = (_piece(each) for each in (address, int(self._nonce.ctypes.data)))
        self._run([(source, target)], HOST, HOST, stop)
        return self._nonce.tobytes().hex()

    def read(self, wanted: Iterable[Wanted], kind: str, stop: Callable[[], bool]) -> None:
        """Read from memory of this ``kind``, and wait until all is there.

        Raises:
            MoveError: it is not. Nothing is written any more.
        """
        self._run(wanted, kind, self._kind, stop)

    def close(self) -> None:
        """Give up the connection; nothing is written any more."""
        while self._flying:
            with suppress(Exception):
                self._flying.pop().release()
        self._agent = None

    def _run(self, wanted: Iterable[Wanted], source: str, target: str, stop: Callable[[], bool]) -> None:
        problem = self._try(wanted, source, target, stop)
        if problem is not None:
            self.close()
            raise problem

    def _try(
        self, wanted: Iterable[Wanted], source: str, target: str, stop: Callable[[], bool]
    ) -> MoveError | None:  # fmt: skip
        """An error comes back without the frames that it went through, which would keep the agent."""
        try:
            agent = self._open()
            for theirs, own in wanted:
                if len(self._flying) == AT_A_TIME:
                    self._wait(agent, stop)
                if stop():
                    raise Abandoned("abandoned")
                local, remote = agent.get_xfer_descs(own, target), agent.get_xfer_descs(theirs, source)
                self._flying.append(agent.initialize_xfer("READ", local, remote, self._name))
                agent.transfer(self._flying[-1])
            while self._flying:
                self._wait(agent, stop)
        except MoveError as error:
            return error.with_traceback(None)
        except Exception as error:  # NIXL's own kinds
            return MoveError(f"NIXL: {type(error).__name__}: {error}")
        return None

    def _wait(self, agent: Agent, stop: Callable[[], bool]) -> None:
        """Until the oldest transfer is over."""
        until_s, pause_s = time.monotonic() + self._timeout_s, FIRST_LOOK_S
        while (state := agent.check_xfer_state(self._flying[0])) == "PROC":
            if stop():
                raise Abandoned("abandoned")
            if time.monotonic() > until_s:
                raise MoveError(f"NIXL: nothing has come for {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        self._flying.popleft().release()
        if state != "DONE":
            raise MoveError(f"NIXL: the transfer has ended with {state}")

    def _open(self) -> Agent:
        if self._agent is None:
            agent = package.open_agent(f"target-{secrets.token_hex(NONCE_BYTES)}")
            place = place_of(self._own)
            agent.register_memory([(place.base, place.num_bytes, place.gpu, "")], self._kind)
            agent.register_memory([(int(self._nonce.ctypes.data), NONCE_BYTES, 0, "")], HOST)
            self._name = agent.add_remote_agent(base64.b64decode(self._metadata))
            self._agent = agent
        return self._agent


def _piece(address: int) -> Pieces:
    """One page's beginning."""
    return np.array([[address, NONCE_BYTES, 0]], np.uint64)
