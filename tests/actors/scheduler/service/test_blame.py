"""A request at which the scheduler fails as it plans: it ends two schedulers, then alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from pagebus.actors.scheduler.beam_search import BeamSearch
from pagebus.actors.scheduler.core.delivery import Delivery
from pagebus.actors.scheduler.core.planner import Planner
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.service.blame import MOST_BLAMES, blamed
from pagebus.bus.dead_letters import read_dead_letters
from pagebus.bus.messages import RequestFailed
from tests.actors.scheduler.fake_model import expected_tokens
from tests.actors.scheduler.served_scheduler import NAMES, PROMPT, Deployment, ask, done
from tests.helpers.waiting import until

POISON = "poison"
GOOD = ["a", "b", "c"]


def fragile(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with a bug: it raises for every sequence of the poisonous request."""

    def fails(self: Any, sequence: Any, *args: Any) -> Any:
        if sequence.request.id == POISON:
            raise RuntimeError("a bug")
        return method(self, sequence, *args)

    return fails


async def until_one_plans(deployment: Deployment) -> int:
    """Start schedulers, as a supervisor does, until one has given the request up; returns how many ended."""
    ended = 0
    while not [each for each in await deployment.replies() if isinstance(each, RequestFailed)]:
        if deployment.life.done():
            assert repr(deployment.life.exception()) == "RuntimeError('a bug')"
            ended += 1
            await deployment.start_scheduler()
        await asyncio.sleep(0.002)
    return ended


@pytest.mark.parametrize(
    ("part", "method"), [(Replica, "bind"), (Delivery, "start"), (Planner, "withdraw")], ids=["admit", "enter", "end"]
)
async def test_a_request_that_ends_schedulers_is_given_up(
    part: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One 500, one dead letter with the error; those beside it get all their tokens, and the last scheduler stays."""
    monkeypatch.setattr(part, method, fragile(getattr(part, method)))
    async with Deployment().running() as deployment:
        await deployment.add_executor(max_num_seqs=2)
        poison = ask(POISON, max_tokens=8)
        await deployment.send(ask("a", max_tokens=40), poison, ask("b", max_tokens=30), ask("c", max_tokens=20))
        ended = await until_one_plans(deployment)
        await deployment.send(ask("late", max_tokens=5))

        core = deployment.scheduler.core
        await until(lambda: set(core.delivery.finished) == {*GOOD, "late"})
        assert 1 <= ended <= MOST_BLAMES
        for request in core.delivery.finished.values():
            output = request.sequences[0].tokens[len(PROMPT) :].tolist()
            assert output == expected_tokens(PROMPT, request.sampling.max_tokens or 0)
        failures = [each for each in await deployment.replies() if isinstance(each, RequestFailed)]
        assert [(each.request_id, each.status) for each in failures] == [(POISON, 500)]
        letters = await read_dead_letters(deployment.bus, NAMES, "scheduler")
        assert [(each.request_id, each.reason) for each in letters] == [(POISON, "RuntimeError: a bug")]
        await deployment.send(done(*GOOD, "late"))
        await until(lambda: core.is_forgettable)
        assert not deployment.scheduler._leader._dead_letters.blamed
        assert not deployment.life.done()
        core.check_integrity()


async def test_all_who_read_a_request_that_ends_schedulers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each ingress once, by the scheduler that gives it up before its core has seen it."""
    monkeypatch.setattr(Delivery, "start", fragile(Delivery.start))
    asking = replace(ask(POISON, max_tokens=8), shared=True)
    async with Deployment().running() as deployment:
        await deployment.send(*(replace(asking, ingress=f"in-{i}", attempt=f"{i}", asked=i) for i in (1, 2)))
        await until(lambda: deployment.scheduler.core.is_read_by(POISON, "2"))
        await deployment.add_executor()
        while not (told := await failures_at(deployment, "in-1", "in-2")):
            if deployment.life.done():
                await deployment.start_scheduler()
            await asyncio.sleep(0.002)
        await until(lambda: deployment.scheduler._outbox.depth == 0)
        assert await failures_at(deployment, "in-1", "in-2") == {"in-1": 1, "in-2": 1}, told


async def failures_at(deployment: Deployment, *ingresses: str) -> dict[str, int]:
    """How many each was told, of those that were told any."""
    told = {each: await deployment.replies(each) for each in ingresses}
    counts = {each: sum(isinstance(one, RequestFailed) for one in messages) for each, messages in told.items()}
    return {each: count for each, count in counts.items() if count}


async def test_who_was_blamed_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets all its tokens; that it was blamed outlives checkpoints and is forgotten with the request."""
    bind = Replica.bind
    async with Deployment().running() as deployment:
        monkeypatch.setattr(Replica, "bind", fragile(Replica.bind))
        await deployment.add_executor()
        await deployment.send(ask(POISON, max_tokens=100))
        await until(deployment.life.done)
        assert repr(deployment.life.exception()) == "RuntimeError('a bug')"
        monkeypatch.setattr(Replica, "bind", bind)
        deployment.pause_after = 20
        await deployment.start_scheduler()
        await until(lambda: len(deployment.tokens()) > 10)
        await deployment.scheduler._leader._sum_up()
        await deployment.lose_scheduler()
        deployment.pause_after = None
        await deployment.start_scheduler()
        assert [blame.times for blame in deployment.scheduler._leader._dead_letters.blamed.values()] == [1]
        await until(lambda: set(deployment.scheduler.core.delivery.finished) == {POISON})
        assert deployment.tokens()[-1] == expected_tokens(PROMPT, 100)[-1]
        await deployment.send(done(POISON))
        await until(lambda: not deployment.scheduler._leader._dead_letters.blamed)


async def test_a_failure_of_nobody_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler ends as ever, and leaves nothing of it."""

    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    async with Deployment().running() as deployment:
        monkeypatch.setattr(Planner, "_promote", fails)
        await deployment.add_executor()
        await until(deployment.life.done)
        assert repr(deployment.life.exception()) == "RuntimeError('a bug')"
        assert await deployment.lengths(NAMES.journal) == [0]
        monkeypatch.undo()
        await deployment.start_scheduler()


def test_errors_outside_of_requests_are_nobodys() -> None:
    with pytest.raises(TypeError) as caught:
        BeamSearch()  # type: ignore[call-arg]
    assert blamed(caught.value) is None
