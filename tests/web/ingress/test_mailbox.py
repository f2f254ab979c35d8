"""The mailbox of an ingress: kept, and opened anew when it may be lost, with everything asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pagebus.actors.telemetry.logs import get_logger
from pagebus.bus.contract import BusUnavailable, EntryId
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import AbortRequest
from pagebus.bus.streams import Names
from pagebus.web.ingress.mailbox import TTL_S, Mailbox
from tests.helpers.waiting import until

STREAM = Names().replies("web@1")


class SlowBus(MemoryBus):
    """A mailbox is opened, and the answer takes a moment, or is lost."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.loses = False
        self.num_opened = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def open_mailbox(self, stream: str, *, ttl_s: int) -> EntryId:
        position = await super().open_mailbox(stream, ttl_s=ttl_s)
        self.num_opened += 1
        await asyncio.sleep(0)
        await self.answers.wait()
        if self.loses:
            raise BusUnavailable("the connection broke")
        return position


class Owner:
    """Of a mailbox; it counts how often it was told to ask again. ``now_s`` is the server's time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.bus = SlowBus(MemoryServer(lambda: self.now_s))
        self.num_reopened = 0
        self.mailbox = Mailbox(self.bus, STREAM, get_logger(), self._reopened)

    def _reopened(self) -> None:
        self.num_reopened += 1

    async def send(self, text: str) -> None:
        await self.bus.publish([(STREAM, AbortRequest(request_id=text))])

    async def read(self) -> list[str]:
        return [entry.message.request_id for entry in await self.mailbox.read()]


@pytest.fixture
def owner() -> Owner:
    return Owner()


async def test_a_mailbox_that_is_kept_is_left_in_peace(owner: Owner) -> None:
    """As long as its owner looks after it, what is in it stays."""
    await owner.mailbox.keep()
    await owner.send("a")
    for _ in range(5):
        owner.now_s += TTL_S / 2
        owner.mailbox.doubt()
        await owner.mailbox.keep()
    await owner.send("b")
    assert (await owner.read(), owner.num_reopened) == (["a", "b"], 1)


@pytest.mark.parametrize("lose", [
    lambda owner: setattr(owner, "now_s", 2.0 * TTL_S),
    lambda owner: owner.mailbox.doubt(lost=True),
], ids=["it has expired", "the bus was started anew"])  # fmt: skip
async def test_one_that_may_be_lost_is_opened_anew(owner: Owner, lose: Callable[[Owner], None]) -> None:
    """Empty. What was read from the one before does not count any more."""
    await owner.mailbox.keep()
    reading = asyncio.create_task(owner.read())
    await asyncio.sleep(0)
    lose(owner)
    await owner.send("old")
    await owner.mailbox.keep()
    assert (await reading, owner.num_reopened) == ([], 2)
    await owner.send("new")
    assert await owner.read() == ["new"]


async def test_nothing_is_read_while_it_is_being_opened(owner: Owner) -> None:
    """What comes before its owner has heard that it is open may follow a gap, and is read when that has been told."""
    await owner.mailbox.keep()
    reading = asyncio.create_task(owner.read())
    await asyncio.sleep(0)
    owner.now_s += 2.0 * TTL_S
    owner.bus.answers.clear()
    opening = asyncio.create_task(owner.mailbox.keep())
    await until(lambda: owner.bus.num_opened == 2)
    await owner.send("a")
    assert (await reading, owner.num_reopened) == ([], 1)
    owner.bus.answers.set()
    await opening
    assert (await owner.read(), owner.num_reopened) == (["a"], 2)


async def test_an_opening_whose_answer_is_lost_is_repeated(owner: Owner) -> None:
    """The mailbox is there then, but what was sent before is not in it."""
    owner.bus.loses = True
    with pytest.raises(BusUnavailable):
        await owner.mailbox.keep()
    assert owner.num_reopened == 0
    owner.bus.loses = False
    await owner.mailbox.keep()
    assert owner.num_reopened == 1


async def test_a_restart_while_it_is_opened_is_not_forgotten(owner: Owner) -> None:
    """It is opened once more, at once, and only then counts as open."""
    keeping = asyncio.create_task(owner.mailbox.keep_for_ever())
    await asyncio.sleep(0)
    owner.mailbox.doubt(lost=True)
    await until(lambda: owner.num_reopened == 1)
    assert owner.bus.num_opened == 2
    keeping.cancel()
    await asyncio.wait([keeping])


async def test_what_was_read_is_trimmed(owner: Owner) -> None:
    """At once when its owner has nothing else to do."""
    await owner.mailbox.keep()
    await owner.send("a")
    await owner.read()
    await owner.mailbox.trim(idle=False)
    assert await owner.bus.length(STREAM) == 1
    await owner.mailbox.trim(idle=True)
    assert await owner.bus.length(STREAM) == 0
