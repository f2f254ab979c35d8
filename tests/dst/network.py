"""The way between actors and the bus: it takes time, and every exchange may be lost, before or after it was applied."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from pagebus.bus.contract import Bus, BusRefused, BusUnavailable, EntryId
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.streams import Names
from tests.dst.loop import SimulatedLoop
from tests.dst.past import Past

LATENCY_S = (2e-5, 1e-3)
COMMAND_TIMEOUT_S = 5.0
LOOK_AGAIN_S = 5.0
"""As in :mod:`pagebus.bus.redis.groups`: how often a consumer looks for what it was given and never got."""
READS = ("read", "read_group", "ping")
ASKS = (*READS, "connect", "close", "consumers", "holders", "last_id", "length", "get_state", "get_rows", "counters",
        "leases")  # fmt: skip
"""Commands that write nothing, or little: a server that is full takes them."""


@dataclass(eq=False, slots=True)
class Exchange:
    """A command of a bus and its answer. ``fate``: lost ``before`` or ``after`` it was applied, or not. ``life``: of
    the server that it was sent to."""

    bus: SimulatedBus
    command: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    answer: asyncio.Future[Any]
    fate: str
    life: int
    result: Any = None


class Network:
    """What is wrong with it just now.

    Attributes:
        lost: the chance of each exchange to be lost.
        slow: how many times as long as usual an exchange takes.
        cut: actors that reach nothing; ``None`` in it: nobody does.
        refusing: the server takes no writes.
        twice: the chance of what is published to arrive twice; claims come in any order meanwhile.
        life: how often the server has been started.
        buses: whoever may have a connection.
    """

    def __init__(self, loop: SimulatedLoop, rng: random.Random, server: MemoryServer) -> None:
        self.loop, self.rng, self.server = loop, rng, server
        self.context = loop.process("network").context
        self.tell: Callable[[str], None] = lambda text: None
        self.cut: set[str | None] = set()
        self.life = 1
        self.buses: list[SimulatedBus] = []
        self.closed = False
        self._held: dict[Exchange, Callable[[Exchange], None]] = {}
        self.heal()

    def heal(self) -> None:
        """Nothing is wrong any more."""
        self.lost, self.slow, self.twice, self.refusing = 0.0, 1.0, 0.0, False
        for name in list(self.cut):
            self.mend(name)

    def mend(self, name: str | None) -> None:
        """An actor, or all of them, can reach the bus again: what was under way arrives."""
        self.cut.discard(name)
        held, self._held = self._held, {}
        for exchange, arrive in held.items():
            self.pass_on(exchange, arrive)

    def restart(self, past: Past) -> None:
        """The server dies, and is there again with what it had stored in the past."""
        self.life += 1
        past.restore(self.server)
        for bus in self.buses:
            bus.disconnect()

    async def close(self) -> None:
        """Nothing arrives any more, and what waits at the server, for the dead too, ends."""
        self.closed = True
        reads = [task for bus in self.buses for task in bus.reads]
        for task in reads:
            task.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    def is_cut(self, owner: str) -> bool:
        """Whether an actor can reach nothing."""
        return None in self.cut or owner in self.cut

    def later(self, lane: Lane, call: Callable[[Exchange], None], exchange: Exchange) -> None:
        """One way. What is sent on one lane arrives in the same order."""
        lane.last_s = max(self.loop.now_s + self.slow * self.rng.uniform(*LATENCY_S), lane.last_s + 1e-6)
        self.loop.call_at(lane.last_s, self.pass_on, exchange, call, context=self.context)

    def pass_on(self, exchange: Exchange, arrive: Callable[[Exchange], None]) -> None:
        """Let something arrive, unless the way is cut; who waits for too long gives up."""
        if not self.is_cut(exchange.bus.owner):
            arrive(exchange)
            return
        self._held[exchange] = arrive
        self.loop.call_later(COMMAND_TIMEOUT_S, self._give_up, exchange, arrive, context=self.context)

    def _give_up(self, exchange: Exchange, arrive: Callable[[Exchange], None]) -> None:
        if self._held.get(exchange) == arrive:
            del self._held[exchange]
            exchange.bus.fail(exchange, BusUnavailable("the bus did not answer in time"))

    def fate(self, command: str) -> str:
        """Whether an exchange is lost: ``before`` or ``after`` it was applied."""
        if not self.lost or self.rng.random() >= self.lost:
            return ""
        fate = self.rng.choice(("before", "after"))
        self.tell(f"{command} is lost {fate} it is applied")
        return fate


@dataclass(slots=True)
class Lane:
    """A connection of an actor, in one direction; when the last thing sent on it arrives."""

    last_s: float = 0.0


def at_once(command: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        command.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a command waits")


class SimulatedBus(Bus):
    """One life's connection: a :class:`MemoryBus` at the other end of the network. Commands outlive who sent them."""

    def __init__(self, network: Network, names: Names, owner: str) -> None:
        super().__init__()
        self.owner = owner
        self.severed = False
        self._network = network
        self._inner = MemoryBus(network.server, names)
        self._there, self._back = Lane(), Lane()
        self._readers = {name: Lane() for name in READS}
        self.reads: dict[asyncio.Task[None], Exchange] = {}
        self._life = 0
        self._looked_s = network.loop.now_s
        network.buses.append(self)

    def disconnect(self) -> None:
        """The server is gone, and with it what waits there."""
        for task, exchange in self.reads.items():
            task.cancel()
            self.fail(exchange, BusUnavailable("the connection broke"))

    def _connect(self) -> None:
        """Who finds another server than the one before is told so. What he was about to say is not said there."""
        if self._life == self._network.life or self._network.is_cut(self.owner):
            return
        known, self._life = self._life, self._network.life
        if known:
            self._inner._recovered.clear()
            self.on_restart()
            raise BusUnavailable("the server has been started anew")

    def sever(self) -> None:
        """Its process is gone."""
        self.severed = True
        for task in self.reads:
            task.cancel()

    def let_go(self, stream: str, group: str, ids: Iterable[EntryId]) -> None:
        """Known here alone, as which entries were handed out."""
        self._inner.let_go(stream, group, ids)

    async def exchange(self, command: str, *args: Any, **options: Any) -> Any:
        """Send a command and wait for its answer."""
        if self.severed:
            raise BusUnavailable("this process is gone")
        network = self._network
        self._connect()
        if network.loop.now_s - self._looked_s > LOOK_AGAIN_S:  # a read of a life before may have been served late
            self._looked_s = network.loop.now_s
            self._inner._recovered.clear()
        answer = network.loop.create_future()
        exchange = Exchange(self, command, args, options, answer, network.fate(command), self._life)
        network.later(self._readers.get(command, self._there), self._arrived, exchange)
        return await answer

    def _arrived(self, exchange: Exchange) -> None:
        network, command, args = self._network, exchange.command, exchange.args
        is_stale = network.closed or exchange.life != network.life
        if is_stale or exchange.fate == "before" or (self.severed and network.rng.random() < 0.5):
            self.fail(exchange, BusUnavailable("the connection broke"))
        elif network.refusing and command not in ASKS:
            self.fail(exchange, BusRefused("the server takes no writes"))
        elif command in READS:
            task = network.loop.create_task(self._read(exchange), context=network.context.copy())
            self.reads[task] = exchange
            task.add_done_callback(self.reads.pop)
        else:
            if command == "publish" and network.twice and network.rng.random() < network.twice:
                at_once(self._inner.publish(*args))
            try:
                exchange.result = at_once(getattr(self._inner, command)(*args, **exchange.options))
            except Exception as error:
                exchange.result = error
            if command == "claim" and network.twice:
                network.rng.shuffle(exchange.result)
            network.later(self._back, self._answered, exchange)

    async def _read(self, exchange: Exchange) -> None:
        """A read waits at the server."""
        try:
            exchange.result = await getattr(self._inner, exchange.command)(*exchange.args, **exchange.options)
        except Exception as error:
            exchange.result = error
        self._network.pass_on(exchange, self._answered)

    def _answered(self, exchange: Exchange) -> None:
        if exchange.fate == "after":
            self.fail(exchange, BusUnavailable("the connection broke"))
        elif exchange.answer.done():
            self._take_back(exchange)
        elif isinstance(exchange.result, Exception):
            exchange.answer.set_exception(exchange.result)
        else:
            exchange.answer.set_result(exchange.result)

    def fail(self, exchange: Exchange, error: BusUnavailable) -> None:
        """There is no answer."""
        self._take_back(exchange)
        if not exchange.answer.done():
            exchange.answer.set_exception(error)

    def _take_back(self, exchange: Exchange) -> None:
        """Entries that a group handed out and that never arrived: the next read is to find them, as the first time."""
        args, command = exchange.args, exchange.command
        if command not in ("read_group", "claim") or not isinstance(exchange.result, list):
            return
        group, consumer = (args[0], args[1]) if command == "read_group" else (args[1], args[2])
        for entry in exchange.result:
            position = (entry.id.epoch, entry.id.index)
            self._inner._held.get((entry.stream, group), set()).discard(position)
            self._inner._recovered.discard((entry.stream, group, consumer))
            if exchange.life != self._network.life:
                continue
            members = self._network.server.stream(entry.stream).groups.get(group)
            if members is not None and position in members.pending:
                members.pending[position].deliveries -= 1


def _command(name: str) -> Any:
    async def call(self: SimulatedBus, *args: Any, **options: Any) -> Any:
        return await self.exchange(name, *args, **options)

    return call


for _name in Bus.__abstractmethods__ - {"let_go"}:
    setattr(SimulatedBus, _name, _command(_name))
SimulatedBus.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
