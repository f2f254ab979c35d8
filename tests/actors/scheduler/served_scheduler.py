"""A scheduler actor on a memory bus, with fake executors behind real streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from msgspec import structs

from pagebus.actors.scheduler.actor import SchedulerActor
from pagebus.actors.settings import Settings
from pagebus.bus.contract import START, EntryId, Fenced, LogEntry
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.bus.messages import (
    AbortRequest,
    Message,
    RequestsDone,
    StepPlan,
    StepResult,
)
from pagebus.bus.streams import Names
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.world import request
from tests.helpers.waiting import until

NAMES = Names("pagebus")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TTL_S = 600.0


class Deployment:
    """A scheduler with its bus, a detokenizer's lease, and executors that can be added."""

    def __init__(self, **settings: object) -> None:
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server, NAMES)
        self.settings = Settings(bus="memory://", **settings)  # type: ignore[arg-type]
        self.results: list[StepResult] = []
        self.executors: dict[str, asyncio.Task[None]] = {}
        self.epochs: dict[str, int] = {}
        self.positions: dict[str, str] = {}
        self.pause_after: int | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Deployment]:
        self.detokenizer_epoch = await self.bus.acquire_lease("detokenizer", "text", {"state": "ready"}, ttl_s=TTL_S)
        await self.start_scheduler()
        try:
            yield self
        finally:
            self.pause_after = None
            self.scheduler.request_drain()
            await asyncio.wait([self.life])
            for name in list(self.executors):
                await self.stop_executor(name)
            if not self.life.cancelled():
                self.life.result()

    async def start_scheduler(self) -> None:
        self.scheduler = SchedulerActor(self.settings, MemoryBus(self.server, NAMES), "scheduler-0")
        self.life = asyncio.create_task(self.scheduler.run())
        await until(lambda: self.scheduler.state == "ready" or self.life.done())
        if self.scheduler._leader is not None:
            self.scheduler._leader.lease_watch._believe_absence_s = (
                0.0  # who leaves is gone, although the scheduler is new
            )

    async def lose_scheduler(self) -> None:
        """It finishes nothing; its lease ends."""
        await until(lambda: self.scheduler._outbox.depth == 0)
        self.life.cancel()
        await asyncio.wait([self.life])

    async def add_executor(self, name: str = "gpu-0", *, falsify: bool = False, **options: int) -> None:
        fake = FakeExecutor(**{"name": name, "block_size": 16, "num_blocks": 64, "max_model_len": 1024, **options})  # type: ignore[arg-type]
        fake.scheduler_epoch = self.scheduler.epoch
        told = dataclasses.asdict(fake.joined) | {"state": "ready"}
        self.epochs[name] = await self.bus.acquire_lease("executor", name, told, ttl_s=TTL_S)
        position = await self.bus.last_id(NAMES.steps(name))
        fake.last_step = position.index
        self.executors[name] = asyncio.create_task(self._execute(fake, self.epochs[name], position, falsify))

    async def _execute(self, fake: FakeExecutor, epoch: int, position: EntryId, falsify: bool) -> None:
        bus = MemoryBus(self.server, NAMES)
        index = 0
        while True:
            for entry in await bus.read({NAMES.steps(fake.name): position}, count=1):
                assert isinstance(entry.message, StepPlan)
                position = entry.id
                if entry.message.executor_epoch != epoch:
                    fake.last_step = position.index
                    continue
                while self.pause_after is not None and len(self.results) >= self.pause_after:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                index += 1
                if position.epoch != fake.scheduler_epoch:
                    fake.follow(position.epoch)
                fake.submit(entry.message)
                result = fake.run_one()
                if falsify and index == 3:
                    result = structs.replace(result, step=99)
                at = EntryId(epoch, index)
                await bus.append([LogEntry(NAMES.results(fake.name), at, result)])
                self.results.append(result)
                self.positions[f"results:{fake.name}"] = str(at)

    async def stop_executor(self, name: str) -> None:
        task = self.executors.pop(name)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Fenced):
            await task

    async def send(self, *messages: Message) -> None:
        for message in messages:
            stream = NAMES.control if isinstance(message, AbortRequest | RequestsDone) else NAMES.tokenized
            await self.bus.publish([(stream, message)])

    async def tell_positions(self) -> None:
        info = {"state": "ready", "positions": dict(self.positions)}
        await self.bus.renew_lease("detokenizer", "text", self.detokenizer_epoch, info, ttl_s=TTL_S)

    def tokens(self) -> list[int]:
        """All tokens sampled so far, for tests with one sequence."""
        return [int(token) for result in self.results for token in result.token_ids]

    async def replies(self, ingress: str = "web") -> list[Message | None]:
        return [entry.message for entry in await self.bus.read({NAMES.replies(ingress): START}, block_ms=0)]

    async def lengths(self, *streams: str) -> list[int]:
        return [await self.bus.length(stream) for stream in streams]


def done(*names: str) -> RequestsDone:
    """Their clients have everything."""
    return RequestsDone(request_ids=names, attempts=("",) * len(names))


def ask(name: str, *, max_tokens: int) -> Message:
    return request(name, PROMPT, block_size=16, max_tokens=max_tokens, ignore_eos=True)
