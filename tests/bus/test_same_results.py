"""MemoryBus and RedisBus give the same answers to the same random commands."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pagebus.bus.contract import FENCE_INDEX, START, Bus, Entry, EntryId, Fenced, LeaseTaken, LogEntry
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import AbortRequest, StepPlan
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.redis.link import RedisLink
from pagebus.bus.redis.url import parse_redis_url
from pagebus.bus.streams import Names

WORK, LOGS, ACTORS = ("w0", "w1"), ("l0", "l1"), ("a", "b", "c")
AHEAD = 2**50
"""An epoch beyond the time in milliseconds."""
Open = Callable[[], Bus]
Expire = Callable[[str], Awaitable[None]]


def shown(entry: Entry) -> tuple[Any, ...]:
    """An entry without what may differ: ids of published entries."""
    if isinstance(entry.message, AbortRequest):
        return (entry.stream, entry.message.request_id, entry.deliveries)
    return (entry.stream, str(entry.id), entry.deliveries, type(entry.message).__name__, entry.error)


class Side:
    """One of the two: its server, a bus per actor, and the ids under which published messages were seen."""

    def __init__(self, names: Names, open_one: Open, expire: Expire) -> None:
        self.names = names
        self.open_one = open_one
        self.expire_key = expire
        self.all = [open_one() for _ in ACTORS]
        self.buses = dict(zip(ACTORS, self.all, strict=True))
        self.seen: dict[str, Entry] = {}
        self.epochs: dict[tuple[str, str], int] = {}
        self.positions = {stream: START for stream in WORK}

    async def close(self) -> None:
        for bus in self.all:
            await bus.close()

    def key(self, stream: str) -> str:
        return self.names.key(stream)

    def note(self, entries: list[Entry]) -> list[tuple[Any, ...]]:
        for entry in entries:
            if isinstance(entry.message, AbortRequest):
                self.seen[entry.message.request_id] = entry
        return [(entry[0].removeprefix(self.names.key("")), *entry[1:]) for entry in map(shown, entries)]

    async def apply(self, command: tuple[Any, ...]) -> Any:
        name, actor, *args = command
        try:
            return await getattr(self, name)(self.buses[actor], actor, *args)
        except (Fenced, LeaseTaken) as error:
            return type(error).__name__

    async def restart(self, bus: Bus, actor: str) -> None:
        await bus.close()
        self.buses[actor] = self.open_one()
        self.all.append(self.buses[actor])

    async def publish(self, bus: Bus, actor: str, stream: str, ids: list[str]) -> None:
        await bus.publish([(self.key(stream), AbortRequest(request_id=one)) for one in ids])

    async def read_group(self, bus: Bus, actor: str, streams: list[str], count: int) -> Any:
        return self.note(await bus.read_group("g", actor, [*map(self.key, streams)], count=count, block_ms=0))

    async def ack(self, bus: Bus, actor: str, ids: list[str]) -> None:
        await bus.ack("g", [self.seen[one] for one in ids if one in self.seen])

    async def claim(self, bus: Bus, actor: str, stream: str, dead: str) -> Any:
        return self.note(await bus.claim(self.key(stream), "g", actor, dead)) if dead != actor else None

    async def consumers(self, bus: Bus, actor: str, stream: str) -> Any:
        # Whether a consumer that was never given anything is listed differs between versions of Redis.
        return {name: pending for name, pending in (await bus.consumers(self.key(stream), "g")).items() if pending}

    async def holders(self, bus: Bus, actor: str, stream: str, ids: list[str]) -> Any:
        known = {
            self.seen[one].id: one for one in ids if one in self.seen and self.seen[one].stream == self.key(stream)
        }
        found = await bus.holders(self.key(stream), "g", [*known])
        return {known[each]: consumer for each, consumer in found.items()}

    async def append(self, bus: Bus, actor: str, entries: list[tuple[str, int, int]]) -> None:
        plan = StepPlan(step=1, planned_s=0.0, num_decodes=0)
        await bus.append([LogEntry(self.key(stream), EntryId(epoch, index), plan) for stream, epoch, index in entries])

    async def read(self, bus: Bus, actor: str, positions: dict[str, tuple[int, int]], count: int) -> Any:
        wanted = {self.key(stream): EntryId(*position) for stream, position in positions.items()}
        return self.note(await bus.read(wanted, count=count, block_ms=0))

    async def read_mail(self, bus: Bus, actor: str, stream: str, count: int) -> Any:
        entries = await bus.read({self.key(stream): self.positions[stream]}, count=count, block_ms=0)
        if entries:
            self.positions[stream] = entries[-1].id
        return self.note(entries)

    async def trim(self, bus: Bus, actor: str, stream: str, position: tuple[int, int]) -> int:
        return await bus.trim(self.key(stream), EntryId(*position))

    async def trim_seen(self, bus: Bus, actor: str, one: str) -> int | None:
        entry = self.seen.get(one)
        return await bus.trim(entry.stream, entry.id) if entry is not None else None

    async def lengths(self, bus: Bus, actor: str) -> Any:
        return [await bus.length(self.key(stream)) for stream in WORK + LOGS]

    async def last_ids(self, bus: Bus, actor: str) -> Any:
        return [await bus.last_id(self.key(stream)) for stream in LOGS]

    async def delete(self, bus: Bus, actor: str, stream: str) -> None:
        """Ids of a new stream begin with the time: it waits for the next millisecond, so that none is the same."""
        await bus.delete(self.key(stream))
        deleted_ms = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 <= deleted_ms:
            pass

    async def acquire(self, bus: Bus, actor: str, kind: str, lease: str) -> int:
        epoch = await bus.acquire_lease(kind, lease, {"by": actor}, ttl_s=1000)
        self.epochs[actor, lease] = epoch
        return epoch

    async def renew(self, bus: Bus, actor: str, kind: str, lease: str, number: int) -> None:
        epoch = self.epochs.get((actor, lease), 0)
        if epoch:
            await bus.renew_lease(kind, lease, epoch, {"by": actor, "number": number}, ttl_s=1000)

    async def release(self, bus: Bus, actor: str, kind: str, lease: str) -> None:
        await bus.release_lease(kind, lease, self.epochs.get((actor, lease), 0))

    async def expire(self, bus: Bus, actor: str, kind: str, lease: str) -> None:
        await self.expire_key(self.names.lease(kind, lease))

    async def leases(self, bus: Bus, actor: str, kind: str | None) -> Any:
        return [(one.kind, one.name, one.epoch, dict(one.info)) for one in await bus.leases(kind)]

    async def state(self, bus: Bus, actor: str, name: str, number: int) -> Any:
        if number % 3 == 0:
            await bus.delete_state(name)
        elif number % 3 == 1:
            await bus.put_state(name, {"number": number})
        return await bus.get_state("x", "y")

    async def row(self, bus: Bus, actor: str, name: str, number: int) -> Any:
        if number % 3 == 0:
            return await bus.delete_row("t", name)
        is_new = await bus.put_row("t", name, {"number": number}, replace=number % 3 == 1)
        return is_new, await bus.get_rows("t")


def random_command(rng: random.Random, number: int) -> tuple[Any, ...]:
    """One command on random things; ``number`` names what it publishes."""
    actor, stream, log = rng.choice(ACTORS), rng.choice(WORK), rng.choice(LOGS)
    old = [f"m{rng.randrange(number + 1)}" for _ in range(rng.randrange(1, 8))]
    position = (rng.randrange(4), rng.choice([0, 1, 2, 3, 5, 8, FENCE_INDEX]))
    indexes = [1, 2, 3, 4, 5, 6, 7, 8, FENCE_INDEX] if rng.random() < 0.2 else [1, 2, 3, 4, 5, 6, 7, 8]
    entries = [(rng.choice(LOGS), rng.randrange(1, 4), rng.choice(indexes)) for _ in range(rng.randrange(1, 4))]
    lease = (rng.choice(["executor", "exec"]), rng.choice(["p", "q:1"]))
    choices: list[tuple[int, tuple[Any, ...]]] = [
        (6, ("publish", actor, stream, [f"m{number}"] * rng.randrange(1, 3))),
        (8, ("read_group", actor, rng.choice([[stream], list(WORK)]), rng.randrange(1, 5))),
        (4, ("ack", actor, old)),
        (2, ("claim", actor, stream, rng.choice(ACTORS))),
        (2, ("consumers", actor, stream)),
        (2, ("holders", actor, stream, old)),
        (3, ("restart", actor)),
        (5, ("append", actor, entries)),
        (4, ("read", actor, {log: position, "l1": position}, rng.randrange(1, 5))),
        (3, ("read_mail", actor, stream, rng.randrange(1, 4))),
        (2, ("trim", actor, log, position)),
        (1, ("trim_seen", actor, old[0])),
        (1, ("delete", actor, rng.choice(WORK + LOGS))),
        (2, ("lengths", actor)),
        (2, ("last_ids", actor)),
        (3, ("acquire", actor, *lease)),
        (3, ("renew", actor, *lease, number)),
        (1, ("release", actor, *lease)),
        (1, ("expire", actor, *lease)),
        (3, ("leases", actor, rng.choice([None, "executor", "exec"]))),
        (2, ("state", actor, rng.choice(["x", "y"]), rng.randrange(6))),
        (2, ("row", actor, rng.choice(["x", "y"]), rng.randrange(6))),
    ]
    return rng.choices([command for _, command in choices], [weight for weight, _ in choices])[0]


@pytest.mark.parametrize("seed", range(20))
async def test_random_commands_give_the_same_results(seed: int, redis_url: str, redis_names: Names) -> None:
    """The same commands, in the same order, have the same results on both buses."""
    server, link = MemoryServer(), RedisLink(parse_redis_url(redis_url), "test")

    async def expire_in_memory(key: str) -> None:
        server.leases.pop(key, None)

    async def expire_in_redis(key: str) -> None:
        await link.call(("DEL", key))

    memory = Side(redis_names, lambda: MemoryBus(server, redis_names), expire_in_memory)
    redis = Side(redis_names, lambda: RedisBus(redis_url, redis_names), expire_in_redis)
    server.epoch = AHEAD
    await link.call(("SET", redis_names.epochs, AHEAD))  # else epochs follow the time there
    rng = random.Random(seed)
    history: list[tuple[Any, ...]] = []
    try:
        for number in range(250):
            command = random_command(rng, number)
            history.append(command)
            expected, got = await memory.apply(command), await redis.apply(command)
            assert got == expected, f"after {history[-6:]}: memory {expected}, redis {got}"
    finally:
        await memory.close()
        await redis.close()
        await link.close()
