"""One Redis connection that many coroutines share: what they send while a round trip is under way goes out together.

A link's own task is the only one that touches the connection, so a cancelled caller can never leave half a reply
behind: its command completes and the reply is dropped. Nothing is sent twice; after a failure the outcome of what was
under way is unknown, and callers hear :class:`BusUnavailable`. The next call opens a new connection.

What was to be said to one server is not said to another, which may have less than the caller built on: who learns of
another server (:class:`Servers`) knows that all it has sent before went to the one of before, or nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import AuthenticationError, ConnectionError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from bus.contract import BusUnavailable
from bus.redis_url import CONNECT_TIMEOUT_S, RedisTarget

COMMAND_TIMEOUT_S = 5.0
"""A server that does not answer for so long (beyond the BLOCK time) counts as gone."""

REPLICATION_TIMEOUT_MS = 1000
"""How long a write may take to reach the replicas that it has to be on."""

Command = tuple[str | bytes | int, ...]
_pack = cast(Callable[[Command], bytes], hiredis.pack_command)
Reply = Any
"""What hiredis makes of a RESP2 reply: bytes, int, None, lists of these, or a ResponseError in its place."""


def info_of(reply: bytes) -> dict[str, str]:
    """What INFO says."""
    return dict(line.partition(":")[::2] for line in reply.decode(errors="replace").splitlines() if ":" in line)


class CredentialsRefused(BusUnavailable):
    """The server does not know our user or password; trying again will not help."""


class Servers:
    """Which server the links of one bus have found last, by its run id ("": none yet, or it does not say).

    Args:
        on_other: called when a link finds another server than the one before, before anything is sent there.
    """

    def __init__(self, on_other: Callable[[], None] = lambda: None) -> None:
        self.last = ""
        self._on_other = on_other

    def found(self, run_id: str) -> None:
        """A link has a connection to this server."""
        before, self.last = self.last, run_id
        if before not in ("", run_id):
            self._on_other()


class _Call:
    __slots__ = ("block_s", "count", "done", "generation", "packed", "server")

    def __init__(self, commands: Sequence[Command], block_s: float, generation: int | None, server: str) -> None:
        self.packed = b"".join([_pack(command) for command in commands])
        self.count = len(commands)
        self.block_s = block_s
        self.generation = generation
        self.server = server
        self.done: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()


class RedisLink:
    """A connection to ``target``, opened when first used and again after each failure.

    Args:
        servers: is told of the server of every connection, before anything else is sent there.

    Attributes:
        generation: grows with each connection opened; lets a WATCH transaction insist on one connection.
        reserved: set by an owner who lends links out.
    """

    def __init__(
        self,
        target: RedisTarget,
        client_name: str,
        *,
        timeout_s: float = COMMAND_TIMEOUT_S,
        writes: bool = False,
        servers: Servers | None = None,
    ) -> None:
        self.target = target
        self._replicas = target.replicas if writes else 0
        self.generation = 0
        self._client_name = client_name
        self._servers = servers or Servers()
        self._server = ""
        self._timeout_s = timeout_s
        self._connection: AbstractConnection | None = None
        self._calls: list[_Call] = []
        self._under_way: list[_Call] = []
        self._wake: asyncio.Event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.reserved = False

    @property
    def busy(self) -> bool:
        """Whether a command is queued or under way."""
        return bool(self._calls or self._under_way)

    def submit(
        self, commands: Sequence[Command], *, block_s: float = 0.0, generation: int | None = None
    ) -> asyncio.Future[list[Reply]]:
        """Queue commands that go out together; the future gets one reply per command (errors in place).

        Args:
            block_s: how long the server may hold the reply back (its BLOCK).
            generation: fail rather than run on any connection but that one.
        """
        call = _Call(commands, block_s, generation, self._servers.last)
        if self._closed:
            call.done.set_exception(BusUnavailable("this bus is closed"))
            return call.done
        self._calls.append(call)
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"redis link {self._client_name}")
        return call.done

    async def call(self, *commands: Command, generation: int | None = None) -> list[Reply]:
        """Send commands together and wait for their replies.

        Raises:
            BusUnavailable: the connection failed; the commands may or may not have been applied.
        """
        return await self.submit(commands, generation=generation)

    async def close(self) -> None:
        """Drop the connection; whatever waits on it hears BusUnavailable. Idempotent."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._fail(self._under_way + self._calls, BusUnavailable("this bus is closed"))
        self._under_way, self._calls = [], []
        await self._drop()

    async def _run(self) -> None:
        while True:
            if not self._calls:
                self._wake.clear()
                await self._wake.wait()
            self._under_way, self._calls = [call for call in self._calls if not call.done.cancelled()], []
            if not self._under_way:
                continue
            try:
                await self._exchange(self._under_way)
            except Exception as error:
                self._fail(self._under_way, self._explain(error))
                with contextlib.suppress(Exception):  # whatever it says about the end of a connection that has failed
                    await self._drop()
            self._under_way = []

    async def _exchange(self, calls: list[_Call]) -> None:
        connection = await self._ready_connection()
        calls = [call for call in calls if self._may_run(call)]
        if not calls:
            return
        stale = False
        async with asyncio.timeout(self._timeout_s + max(call.block_s for call in calls)):
            packed = [call.packed for call in calls]
            if self._replicas:
                packed.append(_pack(("WAIT", self._replicas, REPLICATION_TIMEOUT_MS)))
            await connection.send_packed_command(b"".join(packed), check_health=False)
            answers = []
            for call in calls:
                replies = [await self._read_reply(connection) for _ in range(call.count)]
                stale = stale or any(isinstance(reply, ReadOnlyError) for reply in replies)
                answers.append((call, replies))
                if not self._replicas:
                    self._answer(call, replies)
            if self._replicas and not stale:
                self._check_replicated(await self._read_reply(connection))
        for call, replies in answers:
            self._answer(call, replies)
        if stale:
            await self._drop()  # this server was demoted; the next connection asks again who is master

    def _check_replicated(self, reached: Reply) -> None:
        """What is not on enough replicas may be lost in a failover: to the caller it has not been written."""
        if not isinstance(reached, int) or reached < self._replicas:
            raise BusUnavailable(f"a write has reached {reached} of {self._replicas} replicas of {self.target.text}")

    def _may_run(self, call: _Call) -> bool:
        if call.generation not in (None, self.generation):
            self._fail([call], BusUnavailable(f"the connection to {self.target.text} was lost inside a transaction"))
        elif call.server not in ("", self._server):
            self._fail([call], BusUnavailable(f"Redis at {self.target.text} has been started anew, or is another one"))
        else:
            return True
        return False

    @staticmethod
    async def _read_reply(connection: AbstractConnection) -> Reply:
        try:
            return await connection.read_response(disable_decoding=True)
        except ResponseError as error:
            return error

    async def _ready_connection(self) -> AbstractConnection:
        """The open connection; one that the server closed while it was idle, or to a server that is not the one any
        more, is replaced before anything is sent."""
        if self._connection is not None:
            is_open = self._connection.is_connected and not await self._connection.can_read()
            if is_open and self._server == self._servers.last:
                return self._connection
            await self._drop()
        async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
            connection = self._connection = await self.target.open(self._client_name)
            await connection.send_packed_command(_pack(("INFO", "server")), check_health=False)
            server = await self._read_reply(connection)
        self.generation += 1
        self._server = info_of(server).get("run_id", "") if isinstance(server, bytes) else ""  # no right to INFO
        self._servers.found(self._server)
        return connection

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)

    @staticmethod
    def _answer(call: _Call, replies: list[Reply]) -> None:
        if not call.done.done():
            call.done.set_result(replies)

    @staticmethod
    def _fail(calls: list[_Call], error: BusUnavailable) -> None:
        for call in calls:
            if not call.done.done():
                call.done.set_exception(error)
                call.done.exception()  # a caller that is gone must not make asyncio complain

    def _explain(self, error: Exception) -> BusUnavailable:
        if isinstance(error, BusUnavailable):
            return error
        where = self.target.text
        if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
            return CredentialsRefused(f"Redis at {where} refuses our credentials ({error}): check the bus URL")
        if isinstance(error, TimeoutError | RedisTimeoutError):
            return BusUnavailable(f"Redis at {where} does not answer: is it overloaded, stopped or cut off?")
        if isinstance(error, ConnectionError | RedisError | OSError):
            return BusUnavailable(f"no connection to Redis at {where} ({error}): is it running, is the bus URL right?")
        return BusUnavailable(f"the connection to Redis at {where} failed: {type(error).__name__}: {error}")
