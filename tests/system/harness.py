"""Whole systems in one process, for tests: real actors over a real bus, and a client that counts what is left over."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from pagebus.actors.executor.actor import ExecutorActor
from pagebus.actors.executor.ranks.group import rank_name
from pagebus.actors.runtime.actor import Actor
from pagebus.actors.runtime.process import actor_class
from pagebus.actors.scheduler.actor import SchedulerActor
from pagebus.actors.settings import Settings
from pagebus.actors.tokenizer.actor import TokenizerActor
from pagebus.bus.contract import START, Bus, BusError, EntryId
from pagebus.bus.messages import (
    END_NONE,
    AdapterSource,
    GenerateRequest,
    ReplyBatch,
    RequestFailed,
    RequestsDone,
    SamplingParams,
    SequenceEnded,
    SequenceStarted,
    StepResult,
)
from pagebus.bus.messages.field_types import Int32Array, int_array
from pagebus.bus.streams import Names
from tests.helpers.vanish import vanish
from tests.helpers.waiting import LIMIT_S, eventually

OpenBus = Callable[[], Bus]
LOOK_S = 0.05
"""How often the collector looks for executors, trims, and says how far it has read."""


class TokenCollector(Actor):
    """Stands where a detokenizer stands, but hands out token ids: random-weight models have no text."""

    kind = "detokenizer"

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        super().__init__(settings, bus, name)
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.tokens_from: Counter[str] = Counter()
        """Tokens by the stream they came in."""
        self.came: dict[str, list[tuple[float, str]]] = {}
        """For each token of a request, when it came (monotonic seconds) and in which stream."""
        self.done: dict[str, asyncio.Future[list[int]]] = {}
        self._request_of: dict[int, str] = {}
        self._complete: list[str] = []
        """Requests whose end nobody has been told of yet: the collector stands for the ingress as well."""
        self._positions: dict[str, EntryId] = {self.names.sequences(name): START}

    def lease_info(self) -> dict[str, object]:
        positions = {stream: str(position) for stream, position in self._positions.items()}
        return {**super().lease_info(), "positions": {k.split(":", 2)[2]: v for k, v in positions.items()}}

    def expect(self, request_id: str) -> asyncio.Future[list[int]]:
        self.done[request_id] = asyncio.get_running_loop().create_future()
        return self.done[request_id]

    async def serve(self) -> None:
        own, looked_s = self.names.sequences(self.name), -LOOK_S
        while not self.draining.is_set():
            looks = time.monotonic() - looked_s >= LOOK_S
            if looks:
                looked_s = time.monotonic()
                for lease in await self.bus.leases("executor"):
                    self._positions.setdefault(self.names.results(lease.name), START)
            for entry in await self.bus.read(self._positions, block_ms=int(LOOK_S * 1e3)):
                self._positions[entry.stream] = entry.id
                self._take(entry.stream, entry.message)
            if self._complete:
                done = RequestsDone(request_ids=tuple(self._complete), attempts=("",) * len(self._complete))
                self._complete.clear()
                await self.bus.publish([(self.names.control, done)])
            if looks:
                await self.bus.trim(own, self._positions[own])
                self.set_state("ready")

    def _take(self, stream: str, message: object) -> None:
        if isinstance(message, SequenceStarted):
            self._request_of[message.sequence_id] = message.request_id
            tokens, known = self.tokens.setdefault(message.request_id, []), message.output_token_ids.tolist()
            assert known[: len(tokens)] == tokens, "a token was lost or changed"
            tokens += known[len(tokens) :]
            self._note(message.request_id, stream)
            if message.output_end != END_NONE:
                self._end(message.sequence_id)
            self.cached[message.request_id] = message.num_cached_tokens
        elif isinstance(message, SequenceEnded):
            self._request_of.pop(message.sequence_id, None)
        elif isinstance(message, StepResult):
            self.tokens_from[stream] += len(message.token_ids)
            rows = zip(message.sequence_ids, message.token_ids, message.token_indexes, message.ends, strict=True)
            for sequence_id, token, index, end in rows:
                request_id = self._request_of.get(int(sequence_id))
                if request_id is None or index < len(self.tokens[request_id]):
                    continue
                assert index == len(self.tokens[request_id]), "a token was lost"
                self.tokens[request_id].append(int(token))
                self._note(request_id, stream)
                if end != END_NONE:
                    self._end(int(sequence_id))

    def _note(self, request_id: str, stream: str) -> None:
        """When and whence the tokens have come that are new."""
        came = self.came.setdefault(request_id, [])
        came += [(time.monotonic(), stream)] * (len(self.tokens[request_id]) - len(came))

    def _end(self, sequence_id: int) -> None:
        request_id = self._request_of.pop(sequence_id)
        self._complete.append(request_id)
        if not self.done[request_id].done():
            self.done[request_id].set_result(self.tokens[request_id])


class System:
    """Tokenizer, scheduler, executors and a :class:`TokenCollector`, each with a bus connection of its own."""

    def __init__(self, model: Path, open_bus: OpenBus, *, executors: int = 1, **settings: object) -> None:
        self.settings = Settings(**{
            "model": str(model), "device": "cpu", "threads": 1, "executors": max(1, executors), **settings
        })  # type: ignore[arg-type]  # fmt: skip
        self.names = Names(self.settings.name)
        self.open_bus = open_bus
        self.num_executors = executors
        self.actors: list[Actor] = []
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._ids = itertools.count()

    async def start(self) -> None:
        self.bus = await self._bus()
        await self.bus.delete(self.names.replies("test"))  # of another test on the same server
        self.collector = TokenCollector(self.settings, await self._bus(), "collector")
        self.scheduler = SchedulerActor(self.settings, await self._bus(), "scheduler-0")
        tokenizer = TokenizerActor(self.settings, await self._bus(), "tokenizer-0")
        for actor in (self.collector, self.scheduler, tokenizer):
            self._run(actor)
        for index in range(self.num_executors):
            await self.add_executor(f"executor-{index}")
        await self._until_ready()

    async def add_executor(self, name: str, ranks: int = 0) -> ExecutorActor:
        """All its ranks, as many as the settings say or ``ranks``; returns the first."""
        made, wanted = [], self.settings.replace(tensor_parallel_size=ranks) if ranks else self.settings
        for rank in range(wanted.num_ranks):
            own = wanted.replace(rank=rank, actor_name=name) if wanted.num_ranks > 1 else wanted
            executor = actor_class("executor", own)(own, await self._bus(), name)
            assert isinstance(executor, ExecutorActor)
            self._run(executor)
            made.append(executor)
        return made[0]

    async def restart_group(self, name: str) -> None:
        """Once all ranks of an executor have ended: another life for them."""
        names = [rank_name(name, rank) for rank in range(self.settings.num_ranks)]
        for run in [self._runs.pop(each) for each in names if each in self._runs]:
            with contextlib.suppress(Exception):
                await run
        for ended in [actor for actor in self.actors if actor.name in names]:
            self.actors.remove(ended)
            await ended.bus.close()
        await self.add_executor(name)

    async def remove_executor(self, name: str) -> None:
        """As SIGTERM would."""
        next(actor for actor in self.actors if actor.name == name).request_drain()
        await self._runs.pop(name)

    async def restart_failed_executors(self) -> int:
        """Another life for those that have ended with an error; returns how many."""
        failed = [name for name, run in self._runs.items() if run.done() and name.startswith("executor")]
        for name in failed:
            with contextlib.suppress(Exception):
                await self._runs.pop(name)
            ended = next(actor for actor in self.actors if actor.name == name)
            self.actors.remove(ended)
            await ended.bus.close()
            await self.add_executor(name)
        return len(failed)

    async def kill(self, name: str) -> None:
        """As near to SIGKILL as one process allows: nothing is finished, the lease is left to expire."""
        await vanish(next(actor for actor in self.actors if actor.name == name), self._runs.pop(name))

    async def replace_scheduler(self) -> None:
        """It is killed, and another takes over once its lease has expired."""
        await self.kill("scheduler-0")
        self.actors.remove(self.scheduler)
        await self.scheduler.bus.close()
        self.scheduler = SchedulerActor(self.settings, await self._bus(), "scheduler-0")
        self._run(self.scheduler)

    async def until_tokens(self, count: int) -> None:
        """Until this many tokens have come out, over all requests."""

        async def are_there() -> bool:
            return sum(map(len, self.collector.tokens.values())) >= count

        await eventually(are_there)

    def check(self) -> None:
        """Raises what ended an actor, if one has ended."""
        for run in self._runs.values():
            if run.done():
                run.result()

    async def vanish(self) -> None:
        """All are killed, with whatever is under way."""
        for name in list(self._runs):
            await self.kill(name)
        for actor in self.actors:
            await actor.bus.close()
        await self.bus.close()

    async def stop(self) -> None:
        for actor in self.actors:
            actor.request_drain()
        await asyncio.gather(*self._runs.values())
        for actor in self.actors:
            await actor.bus.close()
        await self.bus.close()

    def submit(
        self, prompt: list[int] | Int32Array, adapter: AdapterSource | None = None, **sampling: object
    ) -> tuple[str, asyncio.Future[list[int]]]:
        """Publish a request; returns its id and the future of its output token ids. An array may hold ids below 0."""
        request_id = f"request-{next(self._ids)}-{uuid.uuid4().hex[:6]}"
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        message = GenerateRequest(
            request_id=request_id,
            ingress="test",
            sampling=params,
            adapter=adapter,
            prompt_token_ids=int_array(prompt) if isinstance(prompt, list) else prompt,
        )
        future = self.collector.expect(request_id)
        sending = asyncio.create_task(self._send(message, future))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return request_id, future

    async def _send(self, message: GenerateRequest, future: asyncio.Future[list[int]]) -> None:
        """Publish a request. If that fails, so does whoever waits for its tokens."""
        try:
            await self.bus.publish([(self.names.requests, message)])
        except BusError as error:
            future.set_exception(error)

    async def generate(self, prompts: list[list[int]], **sampling: object) -> list[list[int]]:
        futures = [self.submit(prompt, **sampling)[1] for prompt in prompts]
        async with asyncio.timeout(LIMIT_S):
            return list(await asyncio.gather(*futures))

    async def failures(self) -> list[RequestFailed]:
        entries = await self.bus.read({self.names.replies("test"): START}, block_ms=0)
        return [entry.message for entry in entries if isinstance(entry.message, RequestFailed)]

    async def leftovers(self) -> dict[str, int]:
        """What is still held once everything is idle: entries of every stream, blocks, slots. All must become 0."""
        streams = [self.names.requests, self.names.tokenized, self.names.control, self.names.journal]
        streams += [self.names.sequences("collector")]
        for actor in self.actors:
            if actor.kind == "executor":
                streams += [self.names.steps(actor.name), self.names.results(actor.name)]
        counts = {stream: await self.bus.length(stream) for stream in streams}
        core = self.scheduler.core
        counts |= {
            "requests": len(core.requests),
            "finished requests": len(core.delivery.finished),
            "waiting sequences": len(core.waiting),
            "slots": core.num_running,
            "blocks": sum(replica.pool.num_blocks - replica.pool.num_free for replica in core.replicas.values()),
            "steps in flight": sum(len(replica.in_flight) for replica in core.replicas.values()),
        }
        return {name: count for name, count in counts.items() if count}

    async def until_clean(self) -> None:
        """Wait until nothing is left over; fails with what is."""
        left: dict[str, int] = {}

        async def is_clean() -> bool:
            nonlocal left
            await self.scheduler.drain()  # what it does once a second by itself; two rounds trim everything
            left = await self.leftovers()
            return not left

        with contextlib.suppress(TimeoutError):
            await eventually(is_clean, look_s=0.05)
        assert not left, left
        self.scheduler.core.check_integrity()

    async def _bus(self) -> Bus:
        bus = self.open_bus()
        await bus.connect()
        return bus

    def _run(self, actor: Actor) -> None:
        self.actors.append(actor)
        self._runs[actor.name] = asyncio.create_task(actor.run(), name=actor.name)

    async def _until_ready(self) -> None:
        await eventually(self._all_ready)

    async def _all_ready(self) -> bool:
        self.check()
        ready = [lease for lease in await self.bus.leases() if lease.info.get("state") == "ready"]
        wanted = 3 + self.num_executors * self.settings.num_ranks
        return len(ready) == wanted and len(self.scheduler.core.replicas) == self.num_executors


@contextlib.asynccontextmanager
async def running(model: Path, open_bus: OpenBus, **options: object) -> AsyncIterator[System]:
    """A started :class:`System`; afterwards nothing may be left over."""
    system = System(model, open_bus, **options)  # type: ignore[arg-type]
    await system.start()
    try:
        yield system
        await system.until_clean()
    finally:
        await system.stop()


def replies(entries: list[object]) -> list[ReplyBatch]:
    """The reply batches among bus entries."""
    return [entry.message for entry in entries if isinstance(entry.message, ReplyBatch)]  # type: ignore[attr-defined]
