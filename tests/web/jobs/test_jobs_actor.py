"""Jobs from the stream: through the same parser as HTTP, answered one by one, whatever their lines say."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis.asyncio

from pagebus.actors.settings import Settings
from pagebus.bus.contract import START, Bus, Entry, EntryId
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import Job, JobResult, RequestFailed
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import JOBS_GROUP, Names
from pagebus.web.jobs.actor import JobsActor
from pagebus.web.jobs.lines import LineError, read_line
from pagebus.web.jobs.worker import MAX_TRIES
from tests.helpers.waiting import LIMIT_S, until, until_empty
from tests.web.fake_backend import MODEL, SENTENCE, FakeBackend

CHAT = {"messages": [{"role": "user", "content": "What is a dog?"}]}


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> str:
    return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or CHAT}).decode()


class World:
    """Jobs actors over one bus with a fake backend behind them."""

    def __init__(self, open_bus: Callable[[], Bus], names: Names) -> None:
        self.open_bus, self.names = open_bus, names
        self.bus = open_bus()
        self.backend = FakeBackend(open_bus(), names)
        self.actors: dict[str, tuple[JobsActor, asyncio.Task[None]]] = {}
        self._read = dict.fromkeys([names.job_results], START)

    async def begin(self, name: str = "jobs-0", **settings: Any) -> JobsActor:
        actor = JobsActor(
            Settings(**{"name": self.names.deployment, "lease_ttl_s": 0.4} | settings),
            self.open_bus(),
            name,
            model=MODEL,
        )
        task = asyncio.create_task(actor.run())
        self.actors[name] = actor, task
        await until(lambda: task.done() or actor.state == "ready")
        return actor

    async def die(self, name: str = "jobs-0") -> None:
        """As kill -9: nothing is sent any more, and the lease expires."""
        actor, task = self.actors.pop(name)
        await actor.bus.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def end(self) -> None:
        for actor, task in self.actors.values():
            actor.request_drain()
            await task
            await actor.bus.close()
        await self.backend.stop()
        await self.bus.close()

    async def push(self, *jobs: Job) -> None:
        await self.bus.publish([(self.names.jobs, job) for job in jobs])

    async def results(self, count: int, stream: str | None = None) -> dict[str, dict[str, Any]]:
        """Wait for so many results; lines by custom id."""
        stream = stream or self.names.job_results
        lines: dict[str, dict[str, Any]] = {}
        async with asyncio.timeout(LIMIT_S):
            while len(lines) < count:
                for entry in await self.bus.read({stream: self._read.get(stream, START)}):
                    assert isinstance(entry.message, JobResult)
                    self._read[stream] = entry.id
                    assert entry.message.custom_id not in lines
                    lines[entry.message.custom_id] = orjson.loads(entry.message.result)
        return lines


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """With a backend that answers, and actors that look around more often than once a second."""
    monkeypatch.setattr("pagebus.web.jobs.actor.LOOK_S", 0.02)
    if request.param == "memory":
        server, names = MemoryServer(), Names()
        made = World(lambda: MemoryBus(server, names), names)
    else:
        url, names = request.getfixturevalue("redis_url"), request.getfixturevalue("redis_names")
        made = World(lambda: RedisBus(url, names), names)
    await made.bus.connect()
    await made.backend.start()
    yield made
    await made.end()


async def test_answers_are_batch_output_lines(world: World) -> None:
    """Of each endpoint, in OpenAI's output format, as jobs to the scheduler; nothing stays in the stream."""
    await world.begin()
    await world.push(Job(request=line("a")), Job(request=line("b", "/v1/completions", prompt="x", n=2), priority="3"))
    results = await world.results(2)
    await world.push(Job(request=line("c", "/v1/embeddings", input="x")))
    (vector,) = (await world.results(1))["c"]["response"]["body"]["data"]

    text = "".join(SENTENCE)
    assert len(vector["embedding"]) == MODEL.hidden_size
    assert results["a"]["error"] is None
    assert results["a"]["response"]["status_code"] == 200
    assert results["a"]["response"]["body"]["choices"][0]["message"]["content"] == text
    assert [each["text"] for each in results["b"]["response"]["body"]["choices"]] == [text, text[:-1] + " 1."]
    assert [(each.is_job, each.priority) for each in world.backend.requests] == [(True, 0), (True, 3), (True, 0)]
    await until_empty(world.bus, world.names.jobs)


BAD: dict[str, tuple[Job, str | int]] = {
    "no fields": (Job(request='{"custom_id": "no fields"}'), "invalid_request"),
    "no body": (Job(request='{"custom_id": "no body", "url": "/v1/completions", "body": 3}'), "invalid_request"),
    "get": (Job(request=line("get").replace("POST", "GET")), "invalid_request"),
    "url": (Job(request=line("url", "/v1/audio")), "invalid_url"),
    "field": (Job(request=line("field", nonsense=1, **CHAT)), 400),
    "stream": (Job(request=line("stream", stream=True, **CHAT)), 400),
    "id": (Job(request=line("id", request_id="mine", **CHAT)), 400),
    "model": (Job(request=line("model", model="other", **CHAT)), 404),
    "priority": (Job(request=line("priority"), priority="high"), "invalid_job"),
    "batch": (Job(request=line("batch"), batch="a b"), "invalid_job"),
    "long": (Job(request=line("long", "/v1/completions", prompt=[5] * 600)), 400),
}
"""Jobs by custom id, with the status or the code of their answer."""


async def test_bad_jobs_are_answered(world: World) -> None:
    """Each with one error line: what HTTP would have said, or why there was no request. The next job is not held up."""
    await world.begin()
    await world.push(*(job for job, _ in BAD.values()), Job(request=line("good")))
    results = await world.results(len(BAD) + 1)

    assert results.pop("good")["response"]["status_code"] == 200
    told = {
        name: (each["response"] or {}).get("status_code") or each["error"]["code"] for name, each in results.items()
    }
    assert told == {custom_id: code for custom_id, (_, code) in BAD.items()}
    assert results["field"]["response"]["body"]["error"]["param"] == "nonsense"


@pytest.mark.parametrize("text", ["{", "[1]", '{"url": "/v1/completions"}'])
async def test_lines_without_an_id(text: str) -> None:
    """A line that does not say who it is, is answered by the id of its entry."""
    with pytest.raises(LineError) as caught:
        read_line(text)
    assert caught.value.custom_id is None


async def test_entries_that_are_no_jobs(redis_url: str, redis_names: Names) -> None:
    """Whatever another program adds to the stream is answered, also if it wants the answer where none can go."""
    world = World(lambda: RedisBus(redis_url, redis_names), redis_names)
    await world.bus.connect()
    await world.backend.start()
    await world.begin()
    client = redis.asyncio.from_url(redis_url)
    mine = f"{redis_names.deployment}:mine"
    await client.set("a string", "x")
    await client.set(redis_names.batch("odd"), "x")
    await client.xadd(redis_names.jobs, {"foo": "bar", "reply_to": mine})
    await client.xadd(redis_names.jobs, {"request": b"\xff\xfe"})
    await client.xadd(redis_names.jobs, {"request": line("lost"), "reply_to": "a string"})
    await client.xadd(redis_names.jobs, {"request": line("odd"), "batch": "odd"})
    await client.aclose()

    told = await world.results(1, mine)
    assert told[""]["error"]["code"] == "invalid_job"
    rest = await world.results(3)
    assert rest[""]["error"]["code"] == "invalid_job"
    assert rest["lost"]["response"]["status_code"] == rest["odd"]["response"]["status_code"] == 200
    await until_empty(world.bus, world.names.jobs)
    await world.end()


async def test_the_commands_of_the_readme(redis_url: str, redis_names: Names) -> None:
    """What a newcomer types: a job goes in, its answer comes out."""
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    push, fetch = re.findall(r"^redis-cli (.*?)(?=^redis-cli|^```)", readme, re.M | re.S)
    world = World(lambda: RedisBus(redis_url, redis_names), redis_names)
    await world.bus.connect()
    await world.backend.start()
    await world.begin()
    client = redis.asyncio.from_url(redis_url)
    here = "{" + redis_names.deployment + "}"
    await client.execute_command(*(word.replace("{pagebus}", here) for word in shlex.split(push)))
    told = await client.execute_command(*(word.replace("{pagebus}", here) for word in shlex.split(fetch)))
    await client.aclose()
    await world.end()

    assert b'"custom_id":"water"' in repr(told).encode()
    assert "".join(SENTENCE) in repr(told)


async def test_results_go_where_they_are_wanted(world: World) -> None:
    """To ``reply_to``; and a batch counts what became of its jobs."""
    await world.begin()
    mine = f"{world.names.deployment}:mine"
    await world.push(*(Job(request=line(f"{i}"), reply_to=mine, batch="b") for i in range(3)))
    await world.push(Job(request="{", reply_to=mine, batch="b"))
    await world.results(4, mine)
    await until_empty(world.bus, world.names.jobs)
    assert await world.bus.counters(world.names.batch("b")) == [{"completed": 3, "failed": 1}]


async def test_window(world: World) -> None:
    """No more jobs are under way than the window holds; the others follow as there is room."""
    world.backend.answers = False
    actor = await world.begin(max_num_jobs=4)
    await world.push(*(Job(request=line(f"{i}")) for i in range(12)))
    await world.backend.requested(4)
    assert actor.window.jobs == 4
    world.backend.answers = True
    for request in list(world.backend.requests):
        await world.backend._answer(request)
    assert len(await world.results(12)) == 12


async def test_a_cancelled_batch_ends(world: World) -> None:
    """What runs is aborted and what waits is not begun; each job is answered with an error that says so."""
    world.backend.answers = False
    await world.begin(max_num_jobs=2)
    await world.push(*(Job(request=line(f"{i}"), batch="b") for i in range(5)))
    await world.backend.requested(2)
    await world.bus.count({world.names.batch("b"): {"cancel": 1}}, ttl_s=60)
    results = await world.results(5)
    assert {each["error"]["code"] for each in results.values()} == {"batch_cancelled"}
    assert len(await world.backend.aborted(2)) == 2
    await until_empty(world.bus, world.names.jobs)
    assert await world.bus.counters(world.names.batch("b")) == [{"cancel": 1, "cancelled": 5}]


async def test_a_job_outlives_its_actor(world: World) -> None:
    """Its next life, or another actor, asks for the same request again as another attempt, and answers once."""
    world.backend.answers = False
    await world.begin()
    await world.push(Job(request=line("a")))
    await world.backend.requested(1)
    await world.die()
    world.backend.answers = True
    await world.begin("jobs-1")
    results = await world.results(1)
    assert results["a"]["response"]["status_code"] == 200
    first, second = world.backend.requests
    assert first.request_id == second.request_id
    assert first.attempt != second.attempt
    assert not second.shared, "a job has one owner"
    await until_empty(world.bus, world.names.jobs)


async def test_drain_leaves_jobs_to_others(world: World) -> None:
    """An actor that is told to end waits for no job: what it had begun goes on elsewhere."""
    world.backend.answers = False
    actor = await world.begin()
    await world.push(Job(request=line("a")))
    await world.backend.requested(1)
    actor.request_drain()
    await world.actors.pop("jobs-0")[1]
    await actor.bus.close()
    await until(lambda: len(world.backend.left) == 1)
    world.backend.answers = True
    await world.begin("jobs-1")
    assert list(await world.results(1)) == ["a"]


async def test_busy_is_tried_again(world: World) -> None:
    """A system without room (503) is asked again, under a new attempt; the job is answered once there is."""
    world.backend.answers = False
    await world.begin()
    await world.push(Job(request=line("a")))
    (first,) = await world.backend.requested(1)
    world.backend.answers = True
    busy = RequestFailed(request_id=first.request_id, status=503, error_type="", message="full")
    await world.backend.send(first.ingress, busy)
    assert (await world.results(1))["a"]["response"]["status_code"] == 200
    assert len({each.attempt for each in world.backend.requests}) == 2


async def test_a_job_that_is_asked_for_elsewhere_is_no_failure(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two actors work on a job, because the lease of one had expired: however often one of them is turned away, the
    other one's answer counts, or its own."""
    monkeypatch.setattr("pagebus.web.jobs.worker.ELSEWHERE_S", 0.01)
    world.backend.answers = False
    await world.begin()
    await world.push(Job(request=line("a")))
    for count in range(1, MAX_TRIES + 2):
        request = (await world.backend.requested(count))[-1]
        if count > MAX_TRIES:
            world.backend.answers = True
        elsewhere = RequestFailed(
            request_id=request.request_id, status=503, error_type="", message="elsewhere", attempt=request.attempt
        )
        await world.backend.send(request.ingress, elsewhere)
    assert (await world.results(1))["a"]["response"]["status_code"] == 200
    await until_empty(world.bus, world.names.jobs)


async def test_a_batch_that_is_cancelled_as_a_job_begins(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that has not begun would not notice that it is cancelled, and its job would not be answered."""
    actor = await world.begin()
    spawn = actor.spawn

    def cancelled(coro: Any, name: str) -> asyncio.Task[Any]:
        task = spawn(coro, name)
        actor._holding.cancel({"night"})
        return task

    monkeypatch.setattr(actor, "spawn", cancelled)
    await world.push(Job(request=line("a"), batch="night"))
    assert (await world.results(1))["a"]["response"]["status_code"] == 200


async def whose_job_is_taken_over(world: World) -> JobsActor:
    """An actor that has begun a job, of which it does not know yet that another one has it."""
    world.backend.answers = False
    first = await world.begin()
    await world.push(Job(request=line("a")))
    await world.backend.requested(1)
    await world.bus.acquire_lease("jobs", "other", {}, ttl_s=60)
    await world.bus.claim(world.names.jobs, JOBS_GROUP, "other", "jobs-0")
    return first


async def test_a_job_that_another_actor_took_over_is_let_go(world: World) -> None:
    """It leaves the window; what comes of it there is the answer."""
    first = await whose_job_is_taken_over(world)
    first.lease_lapsed()
    await until(lambda: first.window.jobs == 0)
    assert (await world.bus.consumers(world.names.jobs, JOBS_GROUP))["other"] == 1


async def test_a_job_that_was_let_go_and_is_given_back_is_begun_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server comes back with what it had before the other actor took it over, which this one had been told."""
    first = await whose_job_is_taken_over(world)
    holders = first.bus.holders

    async def told(*asked: Any) -> Any:
        found = await holders(*asked)
        await world.bus.claim(world.names.jobs, JOBS_GROUP, "jobs-0", "other")
        world.backend.answers = True
        return found

    monkeypatch.setattr(first.bus, "holders", told)
    first._holding.lapsed(first.settings.lease_ttl_s)
    assert (await world.results(1))["a"]["response"]["status_code"] == 200


async def test_a_job_may_come_back_before_it_is_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is begun once more before its first task notices that it has ended: that task says nothing of it."""
    first = await whose_job_is_taken_over(world)
    finished = list[object]()

    def come_back(stream: str, group: str, taken: set[EntryId]) -> None:
        first._holding.begin([Entry(stream, entry_id, Job(request=line("a"))) for entry_id in taken])

    monkeypatch.setattr(first.bus, "let_go", come_back)
    monkeypatch.setattr(first, "_finish", lambda *outcome: finished.append(outcome))
    first.lease_lapsed()
    await until(lambda: first.window.jobs == 0 or finished)
    assert finished == []


async def test_a_job_that_comes_back_goes_on(world: World) -> None:
    """Another actor had taken it over, while this one's lease had expired, and is gone: it is not begun once more."""
    world.backend.answers = False
    actor = await world.begin()
    await world.push(Job(request=line("a")))
    await world.backend.requested(1)
    await world.bus.claim(world.names.jobs, JOBS_GROUP, "gone", "jobs-0")
    for _ in range(2):  # a look may be under way
        looked_s = actor._next_look_s
        await until(lambda since_s=looked_s: actor._next_look_s > since_s)
    assert await world.bus.consumers(world.names.jobs, JOBS_GROUP) == {"jobs-0": 1}
    (request,) = world.backend.requests
    await world.backend._answer(request)
    assert (await world.results(1))["a"]["response"]["status_code"] == 200
    assert len(world.backend.requests) == 1


async def test_a_job_that_is_begun_once_more_is_another_attempt(world: World) -> None:
    """A server has come back with what it had before the answer: what was said of that is not meant now."""
    actor = await world.begin()
    for _ in range(2):
        assert not (await actor.parts.worker.run("1-1", line("a"))).failed
    first, second = world.backend.requests
    assert first.request_id == second.request_id
    assert first.attempt != second.attempt
