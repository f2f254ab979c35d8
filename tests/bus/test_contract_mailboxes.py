"""The mailbox of an actor is there while the actor keeps it; on both buses."""

from __future__ import annotations

import asyncio

from pagebus.bus.contract import START, Bus
from pagebus.bus.messages import AbortRequest
from pagebus.bus.streams import Names
from tests.bus.entries import OpenBus, publish, request_ids

TTL_S = 60


def mailbox(bus: Bus) -> str:
    return bus.names.replies("web@1")


async def test_what_is_sent_to_nobody_is_dropped(bus: Bus) -> None:
    """It brings no stream into being; what goes elsewhere in the same round trip is stored."""
    other = bus.names.replies("somebody who is no actor")
    message = AbortRequest(request_id="a")
    await bus.publish([(mailbox(bus), message), (other, message), (mailbox(bus), message)])
    assert [await bus.length(each) for each in (mailbox(bus), other)] == [0, 1]
    assert await bus.last_id(mailbox(bus)) == START
    assert not await bus.keep_mailbox(mailbox(bus), ttl_s=TTL_S)


async def test_an_open_mailbox_takes_what_is_sent(open_bus: OpenBus) -> None:
    """Its owner reads from the position that it was given, also if it was reading already."""
    owner, writer = open_bus(), open_bus()
    early = asyncio.create_task(owner.read({mailbox(owner): START}, block_ms=60_000))
    await asyncio.sleep(0)
    position = await writer.open_mailbox(mailbox(owner), ttl_s=TTL_S)
    assert await owner.keep_mailbox(mailbox(owner), ttl_s=TTL_S)
    await publish(writer, mailbox(owner), 1)
    assert request_ids(await owner.read({mailbox(owner): position}, block_ms=0)) == ["r1"]
    assert request_ids(await early or await owner.read({mailbox(owner): START}, block_ms=0)) == ["r1"]


async def test_a_mailbox_that_is_opened_again_is_empty(bus: Bus) -> None:
    """And goes on behind what was in it."""
    first = await bus.open_mailbox(mailbox(bus), ttl_s=TTL_S)
    await publish(bus, mailbox(bus), 1)
    again = await bus.open_mailbox(mailbox(bus), ttl_s=TTL_S)
    assert again > first
    assert await bus.read({mailbox(bus): first}, block_ms=0) == []
    await publish(bus, mailbox(bus), 2)
    assert request_ids(await bus.read({mailbox(bus): again}, block_ms=0)) == ["r2"]


async def test_a_mailbox_that_nobody_keeps_is_gone_with_what_is_in_it(bus: Bus) -> None:
    """And takes nothing more, until it is opened again."""
    await bus.open_mailbox(mailbox(bus), ttl_s=TTL_S)
    await publish(bus, mailbox(bus), 1)
    assert await bus.keep_mailbox(mailbox(bus), ttl_s=0)
    await publish(bus, mailbox(bus), 2)
    assert await bus.length(mailbox(bus)) == 0
    assert not await bus.keep_mailbox(mailbox(bus), ttl_s=TTL_S)
    await bus.open_mailbox(mailbox(bus), ttl_s=TTL_S)
    await publish(bus, mailbox(bus), 3)
    assert await bus.length(mailbox(bus)) == 1


def test_only_replies_to_actors_have_such_a_mailbox() -> None:
    """Not those of a measurement, and not streams of another kind, whatever names look like."""
    names = Names("a@b")
    assert [names.is_kept(each) for each in (names.replies("web@1"), names.replies("me"), names.sequences("x@1"))] == [
        True,
        False,
        False,
    ]
