"""One Redis connection shared by many coroutines: commands are sent at once, without waiting for earlier replies.

A cancelled caller leaves nothing behind: its command completes and the reply is dropped. No command is sent twice.
After a failure the outcome of the commands under way is unknown, and their callers get :class:`BusUnavailable`. The
next call opens a new connection.

A command meant for one server is not sent to another one, which may lack data that the caller relied on. When a caller
learns of another server (:class:`Servers`), all its earlier commands have gone to the previous server, or nowhere.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import hiredis
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pagebus.bus.contract import BusUnavailable
from pagebus.bus.redis.replies import is_read_only
from pagebus.bus.redis.stream import RedisStream, Reply
from pagebus.bus.redis.tls import tls_remedy
from pagebus.bus.redis.url import CONNECT_TIMEOUT_S, RedisTarget
from pagebus.bus.redis.wrong_scheme import scheme_problem

COMMAND_TIMEOUT_S = 5.0
"""A server that does not answer for so long (beyond the BLOCK time) counts as gone."""

REPLICATION_TIMEOUT_MS = 1000
"""How long a write may take to reach the required replicas."""

Command = tuple[str | bytes | int, ...]
_pack = cast(Callable[[Command], bytes], hiredis.pack_command)


def info_of(reply: bytes) -> dict[str, str]:
    """What INFO says."""
    return dict(line.partition(":")[::2] for line in reply.decode(errors="replace").splitlines() if ":" in line)


class UrlRefused(BusUnavailable):
    """The scheme, user, password or database is wrong, or one side's certificate to the other; retrying is no help."""


class Servers:
    """The server that the links of one bus found last, by its run id ("": none yet, or unknown).

    Args:
        on_other: called when a link finds another server than the one before, before anything is sent there.
    """

    def __init__(self, on_other: Callable[[], None] = lambda: None) -> None:
        self.last = ""
        self._on_other = on_other

    def found(self, run_id: str) -> None:
        """Note that a link has connected to this server."""
        before, self.last = self.last, run_id
        if before not in ("", run_id):
            self._on_other()


class _Call:
    __slots__ = ("block_s", "count", "deadline_s", "done", "generation", "packed", "replies", "server")

    def __init__(self, commands: Sequence[Command], block_s: float, generation: int | None, server: str) -> None:
        self.packed = b"".join([_pack(command) for command in commands])
        self.count = len(commands)
        self.block_s = block_s
        self.generation = generation
        self.server = server
        self.deadline_s = 0.0
        self.replies: list[Reply] = []
        self.done: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()


class RedisLink:
    """A connection to ``target``, opened when first used and again after each failure.

    Args:
        servers: is told the server of every connection, before anything else is sent there.

    Attributes:
        generation: grows with each connection opened; lets a WATCH transaction insist on one connection.
        reserved: whether one reader has the link for itself.
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
        self._stream: RedisStream | None = None
        self._opening: asyncio.Task[None] | None = None
        self._calls: list[_Call] = []
        """Not sent yet."""
        self._under_way: deque[_Call] = deque()
        """Commands sent and not yet answered, in this order."""
        self._unconfirmed: list[_Call] = []
        """Commands answered by the server but not known to be on its replicas."""
        self._is_demoted = False
        """Whether the server no longer accepts writes: the next connection finds the master again."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.reserved = False

    def reserve(self) -> None:
        """Take the link for one reader."""
        self.reserved = True

    def free(self) -> None:
        """Let others use the link again."""
        self.reserved = False

    @property
    def busy(self) -> bool:
        """Whether a command is queued or under way."""
        return bool(self._calls or self._under_way or self._unconfirmed)

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
        self._send()
        return call.done

    async def call(self, *commands: Command, generation: int | None = None) -> list[Reply]:
        """Send commands together and wait for their replies.

        Raises:
            BusUnavailable: the connection failed; the commands may or may not have been applied.
        """
        return await self.submit(commands, generation=generation)

    async def close(self) -> None:
        """Drop the connection; whatever waits for it gets BusUnavailable. Idempotent."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self._lose(BusUnavailable("this bus is closed"), *self._calls)
        self._calls = []
        await asyncio.sleep(0)  # the loop closes the socket

    # -- out ----------------------------------------------------------------------------------------------------------
    def _send(self) -> None:
        """Send what is queued, if possible; otherwise the end of what prevents it calls this again."""
        self._calls = [call for call in self._calls if not call.done.cancelled()]
        if not self._calls or self._closed or self._opening is not None:
            return
        waits_for_answers = bool(self._under_way or self._unconfirmed)
        if self._stream is None or self._is_demoted or self._server != self._servers.last:
            if not waits_for_answers:
                self.drop()
                self._opening = asyncio.get_running_loop().create_task(self._open(), name=self._client_name)
        elif not (self._replicas and waits_for_answers):  # then all go together, and wait for the replicas once
            calls, self._calls = [call for call in self._calls if self._may_run(call)], []
            if calls and self._replicas:
                calls.append(_Call([("WAIT", self._replicas, REPLICATION_TIMEOUT_MS)], 0.0, None, ""))
            self._write(self._stream, calls)

    def _may_run(self, call: _Call) -> bool:
        if call.generation not in (None, self.generation):
            self._fail([call], BusUnavailable(f"the connection to {self.target.text} was lost inside a transaction"))
        elif call.server not in ("", self._server):
            self._fail([call], BusUnavailable(f"Redis at {self.target.text} has been started anew, or is another one"))
        else:
            return True
        return False

    def _write(self, stream: RedisStream, calls: Sequence[_Call]) -> None:
        if not calls:
            return
        loop = asyncio.get_running_loop()
        for call in calls:
            call.deadline_s = loop.time() + self._timeout_s + call.block_s
        self._under_way += calls
        if self._timer is None:
            self._timer = loop.call_at(calls[0].deadline_s, self._look_at_clock)
        stream.write(b"".join([call.packed for call in calls]))

    async def _open(self) -> None:
        """Open a connection, identify its server and send what is queued."""
        try:
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
                writer = await self.target.open(self._client_name)
                stream = self._stream = RedisStream(writer, self._replied, self._lost)
                asking = _Call([("INFO", "server")], 0.0, None, "")
                self._write(stream, [asking])
                (server,) = await asking.done
        except Exception as error:
            self._lose(await self._explain_opening(error), *self._calls)
            self._calls = []
        else:
            self.generation += 1
            self._server = info_of(server).get("run_id", "") if isinstance(server, bytes) else ""  # no right to INFO
            self._servers.found(self._server)
        finally:
            self._opening = None
        self._send()

    # -- in -----------------------------------------------------------------------------------------------------------
    def _replied(self, reply: Reply) -> None:
        if not self._under_way:
            self._lost(ConnectionError("it sent a reply without a command"))
            return
        call = self._under_way[0]
        call.replies.append(reply)
        self._is_demoted = self._is_demoted or is_read_only(reply)
        if len(call.replies) < call.count:
            return
        self._under_way.popleft()
        if not self._replicas or self._opening is not None:
            self._answer(call)
        elif self._under_way:
            self._unconfirmed.append(call)
        else:
            self._check_replicated(reply)
        if not self._under_way:
            if self._is_demoted:
                self.drop()
            if self._calls:
                self._send()

    def _check_replicated(self, reached: Reply) -> None:
        """Check that writes are on enough replicas. If not, a failover may lose them, so callers get an error."""
        if not self._is_demoted and (not isinstance(reached, int) or reached < self._replicas):
            text = f"a write has reached {reached} of {self._replicas} replicas of {self.target.text}"
            self._lose(BusUnavailable(text))
        for call in self._unconfirmed:
            self._answer(call)
        self._unconfirmed = []

    @staticmethod
    def _answer(call: _Call) -> None:
        if not call.done.done():
            call.done.set_result(call.replies)

    # -- failures -----------------------------------------------------------------------------------------------------
    def drop(self) -> None:
        """End the connection; what is under way there fails."""
        self._lose(BusUnavailable(f"the connection to {self.target.text} was dropped"))

    def _lost(self, error: Exception) -> None:
        self._lose(self._explain(error))
        if self._calls:
            self._send()

    def _lose(self, error: BusUnavailable, *others: _Call) -> None:
        """End the connection with ``error`` for what is under way there, and for ``others``."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.drop()
        self._is_demoted = False
        calls = (*self._unconfirmed, *self._under_way, *others)
        self._unconfirmed = []
        self._under_way.clear()
        self._fail(calls, error)

    def _look_at_clock(self) -> None:
        """Drop the connection if the oldest outstanding reply is late; otherwise look again when it would be."""
        self._timer = None
        if not self._under_way:
            return
        loop = asyncio.get_running_loop()
        if self._under_way[0].deadline_s > loop.time():
            self._timer = loop.call_at(self._under_way[0].deadline_s, self._look_at_clock)
        else:
            self._lost(TimeoutError())

    @staticmethod
    def _fail(calls: Iterable[_Call], error: BusUnavailable) -> None:
        for call in calls:
            if not call.done.done():
                call.done.set_exception(error)
                call.done.exception()  # a caller that is gone must not make asyncio complain

    async def _explain_opening(self, error: Exception) -> BusUnavailable:
        explained = self._explain(error)
        if self.generation > 0 or isinstance(explained, UrlRefused):
            return explained
        problem = await scheme_problem(self.target)
        return explained if problem is None else UrlRefused(f"Redis at {self.target.text} {problem}")

    def _explain(self, error: Exception) -> BusUnavailable:
        if isinstance(error, BusUnavailable):
            return error
        where = self.target.text
        if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
            return UrlRefused(f"Redis at {where} refuses our credentials ({error}): check the bus URL")
        if any(isinstance(each, ResponseError) and "DB index" in str(each) for each in (error, error.__cause__)):
            return UrlRefused(f"Redis at {where} has no such database ({error}): check the bus URL")
        if (remedy := tls_remedy(error)) is not None:
            return UrlRefused(f"Redis at {where} {remedy}")
        if isinstance(error, TimeoutError | RedisTimeoutError):
            return BusUnavailable(f"Redis at {where} does not answer: is it overloaded, stopped or cut off?")
        if isinstance(error, ConnectionError | RedisError | OSError):
            return BusUnavailable(f"no connection to Redis at {where} ({error}): is it running, is the bus URL right?")
        return BusUnavailable(f"the connection to Redis at {where} failed: {type(error).__name__}: {error}")
