"""Calls of many prompts go to the bus in parts: others do not wait behind all of them, and none of them is lost."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from pagebus.bus.messages import AbortRequest, GenerateRequest, RequestFailed, SamplingParams
from pagebus.web.calls.call import Call
from pagebus.web.http.errors import ApiError
from pagebus.web.ingress.inbox import Inbox
from tests.web.fake_backend import SENTENCE, Delta, Serve, batch
from tests.web.ingress.test_inbox import ListOutbox, inbox, outbox

__all__ = ["inbox", "outbox"]
MOST = 3


@pytest.fixture(autouse=True)
def _three_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagebus.web.ingress.fanout.MOST_AHEAD", MOST)


def ask(inbox: Inbox, name: str, count: int, *, client: str = "a", attempt: str = "", priority: int = 0) -> Call:
    return inbox.submit(
        [
            GenerateRequest(request_id=f"{name}{i}", ingress="me", sampling=SamplingParams(), prompt="x",
                            client=client, attempt=attempt, priority=priority)
            for i in range(count)
        ],
        streaming=False,
    )  # fmt: skip


def sent(outbox: ListOutbox) -> list[str]:
    """Requests since the last look."""
    names = [message.request_id for _, message in outbox.sent if isinstance(message, GenerateRequest)]
    outbox.sent = [each for each in outbox.sent if not isinstance(each[1], GenerateRequest)]
    return names


def come(inbox: Inbox, *names: str, finish: str | None = None) -> None:
    inbox.deliver(batch([Delta(name, "x", 1, finish_reason=finish) for name in names]))


def test_as_many_as_may_be_are_ahead(inbox: Inbox, outbox: ListOutbox) -> None:
    """What comes back of one makes room for one more, once."""
    ask(inbox, "a", 6)
    assert sent(outbox) == ["a0", "a1", "a2"]
    come(inbox, "a1")
    assert sent(outbox) == ["a3"]
    come(inbox, "a1", finish="stop")
    assert sent(outbox) == []
    come(inbox, "a0", "a2", finish="stop")
    assert sent(outbox) == ["a4", "a5"]


def test_nobody_else_waits(inbox: Inbox, outbox: ListOutbox) -> None:
    """Neither another client, nor one prompt of the same, nor another priority; calls of a client take turns."""
    ask(inbox, "a", 6)
    sent(outbox)
    ask(inbox, "b", 2, client="b")
    ask(inbox, "c", 1)
    ask(inbox, "d", 2, priority=-1)
    assert sent(outbox) == ["b0", "b1", "c0", "d0", "d1"]
    ask(inbox, "e", 2)
    come(inbox, "a0", "a1", "a2")
    assert sent(outbox) == ["a3", "e0", "a4"]


async def test_a_call_that_is_over_makes_room(inbox: Inbox, outbox: ListOutbox) -> None:
    """What was not sent of it never is, nor aborted; what was is."""
    first = ask(inbox, "a", 6)
    ask(inbox, "b", 2)
    sent(outbox)
    inbox.deliver(RequestFailed(request_id="a1", status=400, message="no", error_type="BadRequestError"))
    with pytest.raises(ApiError):
        await first.finished()
    inbox.close(first, delivered=False)
    aborted = [message.request_id for _, message in outbox.sent if isinstance(message, AbortRequest)]
    assert aborted == ["a0", "a2", "a3"]
    assert sent(outbox) == ["a3", "b0", "b1"]
    come(inbox, "b0", "b1", finish="stop")
    ask(inbox, "c", 4)
    assert sent(outbox) == ["c0", "c1", "c2"]
    assert inbox.num_open == 4


def test_a_call_that_goes_on_without_its_client_is_sent(inbox: Inbox, outbox: ListOutbox) -> None:
    """Nobody is there any more to see what has come."""
    call = ask(inbox, "a", 6, attempt="1")
    sent(outbox)
    assert inbox.close(call, delivered=False)
    assert sent(outbox) == ["a3", "a4", "a5"]
    ask(inbox, "b", 6)
    assert sent(outbox) == ["b0", "b1", "b2"]


def test_what_was_not_sent_is_not_asked_for_again(
    inbox: Inbox, outbox: ListOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when the bus may have lost requests, nor when they are silent; and it is silent from then on."""
    ask(inbox, "a", 5)
    sent(outbox)
    inbox.retries.retry_all()
    assert sent(outbox) == ["a0", "a1", "a2"]
    monkeypatch.setattr("pagebus.web.calls.call.SILENT_S", 0.0)
    for request in inbox.open_requests():
        request.patience_s = 0.0
    inbox.retries.retry_silent()
    assert sent(outbox) == ["a0", "a1", "a2"]
    come(inbox, "a0")
    assert sent(outbox) == ["a3"]


def test_two_calls_for_the_same(inbox: Inbox, outbox: ListOutbox) -> None:
    """Of an idempotency key: what comes is for both, and neither holds room for ever."""
    calls = [ask(inbox, "a", 5, attempt=str(attempt)) for attempt in range(2)]
    assert sent(outbox) == ["a0", "a1", "a2"]
    names = [f"a{i}" for i in range(5)]
    come(inbox, *names, finish="stop")
    assert all(call.done for call in calls)
    for call in calls:
        inbox.close(call, delivered=True)
    sent(outbox)
    ask(inbox, "b", 4)
    assert sent(outbox) == ["b0", "b1", "b2"]


async def test_whole_answers(serve: Serve, http: aiohttp.ClientSession) -> None:
    """Several calls of more prompts than may be ahead; the client of one leaves, and all others are answered."""
    served = await serve()

    async def post(count: int) -> list[str]:
        async with http.post(served.url + "/v1/completions", json={"prompt": ["x"] * count}) as response:
            return [choice["text"] for choice in (await response.json())["choices"]]

    counts = (10, 1, 7, 4)
    leaving = asyncio.create_task(post(20))
    tasks = [asyncio.create_task(post(count)) for count in counts]
    await served.backend.requested()
    leaving.cancel()
    answers = await asyncio.gather(*tasks)
    assert answers == [["".join(SENTENCE)] * count for count in counts]
