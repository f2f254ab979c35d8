"""Clients that leave, move and ask again, as the scheduler actor hears of them on a memory bus."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest
from msgspec import structs

from pagebus.actors.scheduler.events import RequestGivenUp, RequestOver
from pagebus.bus.contract import START, BusRefused, EntryId
from pagebus.bus.messages import (
    AbortRequest,
    RequestFailed,
    RequestsDone,
    RequestTimed,
    SchedulerLeads,
    SequenceEnded,
    SequenceStarted,
    TokenizedRequest,
)
from pagebus.bus.streams import address_of
from tests.actors.scheduler.fake_model import expected_tokens
from tests.actors.scheduler.served_scheduler import NAMES, PROMPT, TTL_S, Deployment, ask
from tests.helpers.waiting import until, until_empty


async def attempts_left(deployment: Deployment) -> dict[EntryId, str]:
    """Of tokenized requests on the bus: the attempt of each entry."""
    left = {}
    for entry in await deployment.bus.read({NAMES.tokenized: START}, block_ms=0):
        assert isinstance(entry.message, TokenizedRequest)
        left[entry.id] = entry.message.attempt
    return left


async def test_requests_of_a_gone_ingress_are_given_up() -> None:
    """Nobody comes back for them in time: the detokenizer is told to drop the sequence."""
    async with Deployment(resume_timeout_s=0.0).running() as deployment:
        epoch = await deployment.bus.acquire_lease("ingress", "web", {"state": "ready"}, ttl_s=TTL_S)
        address = address_of("web", epoch)
        await deployment.add_executor()
        deployment.pause_after = 6
        await deployment.send(structs.replace(ask("a", max_tokens=900), ingress=address))
        await until(lambda: len(deployment.tokens()) > 3)
        await deployment.bus.release_lease("ingress", "web", epoch)
        await until(lambda: not deployment.scheduler.core.requests)
        await until(lambda: len(deployment.server.streams[NAMES.sequences("text")].fields) == 3)
        entries = await deployment.bus.read({NAMES.sequences("text"): START})
        assert [type(entry.message) for entry in entries] == [SchedulerLeads, SequenceStarted, SequenceEnded]


async def test_a_request_of_an_ingress_that_nobody_saw_is_given_up() -> None:
    """It arrives after its ingress has died: the first look finds out."""
    async with Deployment(resume_timeout_s=0.0).running() as deployment:
        await deployment.add_executor()
        deployment.pause_after = 6
        await deployment.send(structs.replace(ask("a", max_tokens=900), ingress=address_of("web", 1)))
        await until(lambda: not deployment.scheduler.core.requests)


@pytest.mark.parametrize("scheduler_dies", [False, True])
async def test_a_client_that_moved_and_died_is_noticed(scheduler_dies: bool) -> None:
    """It asked again from another address, which died before anybody looked, or together with the scheduler: nobody
    waits for it for ever."""
    async with Deployment(resume_timeout_s=0.0, lease_ttl_s=0.5).running() as deployment:
        await deployment.add_executor()
        deployment.pause_after = 6
        epoch = await deployment.bus.acquire_lease("ingress", "web", {"state": "ready"}, ttl_s=TTL_S)
        first = structs.replace(ask("a", max_tokens=900), ingress=address_of("web", epoch), attempt="1")
        await deployment.send(first)
        await until(lambda: len(deployment.tokens()) > 3)
        other = epoch + 100
        if scheduler_dies:
            other = await deployment.bus.acquire_lease("ingress", "other", {"state": "ready"}, ttl_s=TTL_S)
        await deployment.send(structs.replace(first, ingress=address_of("other", other), attempt="2"))
        if scheduler_dies:
            await until(lambda: deployment.scheduler.core.attempt_of("a") == "2")
            await deployment.lose_scheduler()
            await deployment.bus.release_lease("ingress", "other", other)
            deployment.pause_after = 12
            await deployment.start_scheduler()
            await until(lambda: "a" in deployment.scheduler.core.requests)
        await until(lambda: not deployment.scheduler.core.requests)


@pytest.mark.parametrize("scheduler_dies", [False, True])
async def test_who_asked_last_is_answered_even_if_held_up_attempts_come_later(scheduler_dies: bool) -> None:
    """A tokenizer was frozen with the first attempt, whose ingress has died since: replies stay with the second."""
    async with Deployment().running() as deployment:
        held_up, first, last = (
            structs.replace(ask("a", max_tokens=900), ingress=address_of("web", i), attempt=str(i), asked=i)
            for i in (1, 2, 3)
        )
        await deployment.send(first, last)
        await until(lambda: deployment.scheduler.core.attempt_of("a") == "3")
        if scheduler_dies:
            await deployment.lose_scheduler()
            await deployment.start_scheduler()
        await deployment.send(held_up, AbortRequest(request_id="another"))
        await until_empty(deployment.bus, NAMES.control)
        scheduler = deployment.scheduler
        await until(lambda: not scheduler._leader.work.has_settled)
        request = scheduler.core.requests["a"]
        newest = request.readers.newest
        assert (newest.attempt, newest.ingress) == ("3", last.ingress)
        assert await deployment.lengths(NAMES.tokenized) == [1]
        await deployment.send(AbortRequest(request_id="a", attempt="3"))


async def test_an_abort_overtakes_over_the_bus() -> None:
    """Abort before request: nothing is ever scheduled."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        await deployment.send(AbortRequest(request_id="a"))
        await until_empty(deployment.bus, NAMES.control)
        await deployment.send(ask("a", max_tokens=5), ask("b", max_tokens=2))
        await until(lambda: len(deployment.tokens()) == 2)
        assert deployment.scheduler.core.is_idle or deployment.scheduler.core.requests.keys() <= {"b"}


@pytest.mark.parametrize("end", ["left", "refused"])
async def test_a_request_asked_for_anew_keeps_its_entry_when_the_attempt_before_is_over_in_that_turn(end: str) -> None:
    """Its own end comes later: until then a successor finds it."""
    async with Deployment().running() as deployment:
        again = structs.replace(ask("r", max_tokens=8), attempt="2")
        first = structs.replace(again, attempt="1")
        if end == "left":
            await deployment.send(AbortRequest(request_id="r", attempt="1", may_return=True))
            await until_empty(deployment.bus, NAMES.control)
        else:
            first = structs.replace(first, prompt_token_ids=np.array([2**30], np.int32))
        await deployment.send(first, again, AbortRequest(request_id="another"))
        await until_empty(deployment.bus, NAMES.control)
        work = deployment.scheduler._leader.work
        await until(lambda: not work.has_settled)
        assert list((await attempts_left(deployment)).values()) == ["2"]
        assert deployment.scheduler.core.attempt_of("r") == "2"
        await deployment.lose_scheduler()
        await deployment.start_scheduler()
        await deployment.add_executor()
        await until(lambda: len(deployment.tokens()) == 8)
        await deployment.send(RequestsDone(request_ids=("r",), attempts=("2",)))
        await until_empty(deployment.bus, NAMES.tokenized)


async def test_a_request_asked_for_anew_keeps_its_entry_when_the_attempt_before_is_given_up_in_that_turn() -> None:
    """It costs a dead letter, but is no reason to forget the newer attempt."""
    async with Deployment().running() as deployment:
        await deployment.send(structs.replace(ask("r", max_tokens=8), attempt="2"))
        leader = deployment.scheduler._leader
        await until(lambda: deployment.scheduler.core.attempt_of("r") == "2")
        leader._outputs.route(RequestGivenUp("r", "executors end computing it"))
        leader._outputs.route(RequestOver("r"))
        dead_letters = NAMES.dead_letters("scheduler")
        await until(lambda: dead_letters in deployment.server.streams)
        await deployment.send(AbortRequest(request_id="another"))
        await until_empty(deployment.bus, NAMES.control)
        await until(lambda: not leader.work.has_settled)
        assert await deployment.lengths(dead_letters, NAMES.tokenized) == [1, 1]
        await deployment.send(AbortRequest(request_id="r", attempt="2"))
        await until_empty(deployment.bus, NAMES.tokenized)


async def test_an_entry_that_is_handed_out_twice_stays_until_its_request_is_over() -> None:
    """A server that took over from another may not know that it has delivered an entry: it is no second request."""
    async with Deployment().running() as deployment:
        await deployment.send(ask("r", max_tokens=8))
        await until(lambda: "r" in deployment.scheduler._leader.work.requests)
        deployment.scheduler._leader._put(deployment.scheduler._leader.work.requests["r"])
        await deployment.send(AbortRequest(request_id="another"))
        await until_empty(deployment.bus, NAMES.control)
        assert await deployment.lengths(NAMES.tokenized) == [1]
        await deployment.send(AbortRequest(request_id="r"))
        await until(lambda: not deployment.scheduler._leader.work.requests)


@pytest.mark.parametrize("same", [True, False])
async def test_who_asks_again_for_the_same_is_served_by_the_newest_entry(same: bool) -> None:
    """The bus may have lost the one before, with everything else: a successor finds the newer one. Another request
    with the id is refused, and the first stands."""
    async with Deployment().running() as deployment:
        first = ask("r", max_tokens=8)
        again = structs.replace(first if same else ask("r", max_tokens=9), attempt="again")
        await deployment.send(first, again, AbortRequest(request_id="another"))
        await until_empty(deployment.bus, NAMES.control)
        scheduler = deployment.scheduler
        await until(lambda: not scheduler._leader.work.has_settled)
        newest = scheduler._leader.work.requests["r"].id
        assert await attempts_left(deployment) == {newest: "again" if same else ""}
        await deployment.lose_scheduler()
        await deployment.start_scheduler()
        await deployment.add_executor()
        await until(lambda: len(deployment.tokens()) == 8)
        assert deployment.tokens() == expected_tokens(PROMPT, 8)


async def test_who_cannot_renew_its_own_lease_gives_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus takes no writes and answers reads: others may have lost their leases by that."""
    async with Deployment().running() as deployment:
        bus, lease_watch = deployment.bus, deployment.scheduler._leader.lease_watch
        epoch = await bus.acquire_lease("ingress", "web", {"state": "ready"}, ttl_s=TTL_S)
        await until(lambda: address_of("web", epoch) in deployment.scheduler._leader.membership.ingresses)

        async def refuse(*_: object, **__: object) -> NoReturn:
            raise BusRefused("the server takes no writes")

        with monkeypatch.context() as patch:
            patch.setattr(deployment.scheduler.bus, "renew_lease", refuse)
            deployment.scheduler.set_state("ready")  # renews the lease at once
            await until(lambda: deployment.scheduler.bus_is_away)
            await bus.release_lease("ingress", "web", epoch)
            looked_s = lease_watch.looked_s
            await until(lambda: lease_watch.looked_s > looked_s)
            assert address_of("web", epoch) in deployment.scheduler._leader.membership.ingresses


async def test_who_waits_where_the_request_goes_on_no_more_is_told() -> None:
    """A dying ingress sends what its client asked for there before it went to another one: whichever comes last, nobody
    waits for ever. Those who asked again at the same ingress know."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        deployment.pause_after = 6
        epochs = [await deployment.bus.acquire_lease("ingress", name, {}, ttl_s=TTL_S) for name in ("old", "new")]
        old, new = (address_of(name, epoch) for name, epoch in zip(("old", "new"), epochs, strict=True))
        for address in (old, new):
            await deployment.bus.open_mailbox(NAMES.replies(address), ttl_s=60)
        for address, attempt, asked in ((new, "b", 2), (new, "c", 3), (old, "a", 4), (new, "d", 1)):
            request = structs.replace(ask("a", max_tokens=900), ingress=address, attempt=attempt, asked=asked)
            await deployment.send(request)
        await until_empty(deployment.bus, NAMES.control)
        await until(lambda: deployment.scheduler.core.attempt_of("a") == "a")
        told: list[tuple[str, int]] = []
        while len(told) < 2:
            told = [
                (each.attempt, each.status) for each in await deployment.replies(new) if isinstance(each, RequestFailed)
            ]
        assert told == [("c", 503), ("d", 503)]
        assert not [each for each in await deployment.replies(old) if isinstance(each, RequestFailed)]


async def test_all_who_read_a_traced_request_are_told_its_times() -> None:
    """Also who had it all before the last one had."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        asking = structs.replace(ask("a", max_tokens=8), shared=True, traced=True)
        await deployment.send(*(structs.replace(asking, ingress=f"in-{i}", attempt=f"{i}", asked=i) for i in (1, 2)))
        await until(lambda: "a" in deployment.scheduler.core.delivery.finished)
        for attempt in ("1", "2"):
            await deployment.send(RequestsDone(request_ids=("a",), attempts=(attempt,)))
        await until(lambda: deployment.scheduler.core.is_forgettable)
        for ingress in ("in-1", "in-2"):
            times: list[RequestTimed] = []
            while not times:
                times = [each for each in await deployment.replies(ingress) if isinstance(each, RequestTimed)]
            assert [each.request_id for each in times] == ["a"]
