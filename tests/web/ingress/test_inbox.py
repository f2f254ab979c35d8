"""Calls and the mailbox, without HTTP."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from pagebus.actors.telemetry.logs import get_logger
from pagebus.actors.telemetry.metrics import Metrics
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import (
    AbortRequest,
    GenerateRequest,
    PromptReply,
    ReplyBatch,
    RequestFailed,
    RequestsDone,
    SamplingParams,
    StopSequence,
)
from pagebus.bus.outbox import OUTBOX_LIMIT
from pagebus.bus.streams import Names
from pagebus.web.calls.call import Call
from pagebus.web.http.errors import ApiError, internal, unavailable
from pagebus.web.ingress.inbox import Inbox
from pagebus.web.telemetry.metrics import IngressMetrics
from tests.helpers.waiting import until_empty
from tests.web.fake_backend import Delta, batch


class ListOutbox:
    """An outbox that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []
        self.depth = 0

    def publish(self, stream: str, message: object, *, num_bytes: int = 0) -> None:
        self.sent.append((stream.rpartition(":")[2], message))

    def drop_unsendable(self, tell: object) -> None:
        """Everything can be sent."""


@pytest.fixture
def outbox() -> ListOutbox:
    return ListOutbox()


@pytest.fixture
def inbox(outbox: ListOutbox) -> Inbox:
    bus, metrics = MemoryBus(MemoryServer()), IngressMetrics(Metrics(), 100)
    return Inbox(bus, Names(), "me", outbox, metrics, get_logger())


def ask(inbox: Inbox, *ids: str, n: int = 1, streaming: bool = True) -> Call:
    sampling = SamplingParams(n=n)
    requests = [GenerateRequest(request_id=i, ingress="me", sampling=sampling, prompt="x") for i in ids]
    return inbox.submit(requests, streaming=streaming)


async def test_deltas_are_joined(inbox: Inbox):
    """A handler that is behind finds one change per choice with all the text."""
    call = ask(inbox, "a", "b")
    inbox.deliver(batch([Delta("a", "1", 1), Delta("b", "x", 1)]))
    inbox.deliver(batch([Delta("a", "2", 2)]))

    changed = await call.changes()

    assert [(choice.index, choice.take_text()) for choice in changed] == [(0, "12"), (1, "x")]
    assert changed[0].texts == []


async def test_a_whole_answer_wakes_once(inbox: Inbox):
    """Who does not stream is woken by the end only."""
    call = ask(inbox, "a", streaming=False)
    finished = asyncio.create_task(call.finished())
    inbox.deliver(batch([Delta("a", "1", 1)]))
    await asyncio.sleep(0)
    assert not finished.done()

    inbox.deliver(batch([Delta("a", "2", 2, finish_reason="stop")]))
    await finished

    assert call.choices[0].take_text() == "12"
    assert inbox.num_open == 0


async def test_what_the_bus_may_have_lost_is_asked_for_again(inbox: Inbox, outbox: ListOutbox):
    """As another attempt: replies with a gap are passed over, what comes again is dropped, the rest goes on."""
    call = ask(inbox, "a", "b")
    inbox.deliver(batch([Delta("a", "one ", 1), Delta("b", "x", 1, finish_reason="stop")]))
    (request, _), resumable = call.requests, call.resumable
    outbox.sent.clear()

    inbox.retries.retry_all()

    sampling, attempt = SamplingParams(), request.attempt
    asked = GenerateRequest(request_id="a", ingress="me", sampling=sampling, prompt="x", attempt=attempt)
    assert outbox.sent == [("requests", asked)]
    assert request.attempt
    assert call.resumable == resumable is False
    last = Delta("a", "three", 3, finish_reason="stop", text_offset=8)
    inbox.deliver(batch([last]))
    assert not call.done
    inbox.deliver(batch([Delta("a", "one two ", 2, text_offset=0), last]))
    assert call.done
    assert call.choices[0].take_text() == "one two three"
    inbox.close(call, delivered=True)
    assert outbox.sent[1:] == [("control", RequestsDone(request_ids=("a", "b"), attempts=(request.attempt, "")))]


async def test_what_is_silent_is_asked_for_again(inbox: Inbox, outbox: ListOutbox, monkeypatch: pytest.MonkeyPatch):
    """Whatever became of it; ever less often, until something of it comes. What goes on is left in peace."""
    now_s = 1000.0
    monkeypatch.setattr("pagebus.web.ingress.inbox.time.monotonic", lambda: now_s)
    ask(inbox, "lost", "runs")
    outbox.sent.clear()
    asked: dict[str, list[float]] = {"lost": [], "runs": []}

    for second in range(200):
        now_s = 1000.0 + second
        if second < 100 or second == 150:
            inbox.deliver(batch([Delta("runs", "x", second + 1)]))
        if second == 150:
            inbox.deliver(batch([Delta("lost", "x", 1)]))
        inbox.retries.retry_silent()
        for _, message in outbox.sent:
            asked[message.request_id].append(second)
        outbox.sent.clear()

    # looks are 3 s apart
    assert asked["lost"] == [21, 63, 144, 171]
    assert asked["runs"] == [120, 171]


async def test_close_aborts_what_runs(inbox: Inbox, outbox: ListOutbox):
    """What has ended is not aborted."""
    call = ask(inbox, "a", "b")
    inbox.deliver(batch([Delta("a", "1", 1, finish_reason="stop")]))
    outbox.sent.clear()

    inbox.close(call, delivered=False)

    done = RequestsDone(request_ids=("a",), attempts=("",))
    assert outbox.sent == [("control", AbortRequest(request_id="b")), ("control", done)]
    await inbox.idle()


class Lines:
    """A log of which tests see the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def info(self, event: str, **_: object) -> None:
        self.events.append(event)


@pytest.mark.parametrize(("attempt", "event"), [("", "aborted"), ("1", "left running")])
async def test_the_log_tells_what_ends_from_what_goes_on(outbox: ListOutbox, attempt: str, event: str):
    """A request that its client, or another jobs actor, may ask for again is not aborted."""
    log, bus = Lines(), MemoryBus(MemoryServer())
    inbox = Inbox(bus, Names(), "me", outbox, IngressMetrics(Metrics(), 100), log)
    request = GenerateRequest(request_id="a", ingress="me", sampling=SamplingParams(), prompt="x", attempt=attempt)
    inbox.close(inbox.submit([request], streaming=True), delivered=False)
    assert log.events == [event]


async def test_who_comes_after_the_end_is_told_so(inbox: Inbox, outbox: ListOutbox):
    """A handler may still be on its way when everything ends. Nobody would end its call."""
    inbox.fail_all(unavailable("The server is shutting down."))

    with pytest.raises(ApiError, match="shutting down") as refused:
        ask(inbox, "r")

    assert refused.value.status == 503
    assert inbox.num_open == 0
    assert outbox.sent == []


async def test_failure_after_text(inbox: Inbox):
    """What came before the failure is handed out before it."""
    call = ask(inbox, "a")
    inbox.deliver(batch([Delta("a", "1", 1)]))
    inbox.fail_all(internal())

    assert [choice.take_text() for choice in await call.changes()] == ["1"]
    with pytest.raises(ApiError):
        await call.changes()


@pytest.mark.parametrize(
    "message",
    [
        StopSequence(request_id="a", sequence_id=1),
        ReplyBatch(request_ids=("a",), texts=("x",), finish_reasons=(None,), stop_reasons=(None,)),
    ],
)
async def test_what_is_no_reply(inbox: Inbox, message):
    """A message that makes no sense here is described, for the dead letters."""
    ask(inbox, "a")

    assert inbox.deliver(message)


async def test_replies_nobody_waits_for(inbox: Inbox):
    """Unknown requests and choices are ignored."""
    call = ask(inbox, "a")

    assert inbox.deliver(batch([Delta("zz", "x", 1), Delta("a", "x", 1, choice_index=1)])) == ""
    assert call.choices[0].num_tokens == 0


async def test_a_full_outbox(inbox: Inbox, outbox: ListOutbox):
    """New requests are refused while there is still room for the aborts of the old."""
    outbox.depth = OUTBOX_LIMIT // 2

    with pytest.raises(ApiError) as caught:
        ask(inbox, "a")

    assert caught.value.status == 503
    assert (outbox.sent, inbox.num_open) == ([], 0)


@pytest.mark.parametrize("stage", ["ingress", "jobs"])
async def test_garbage_in_the_mailbox_is_dead_lettered(outbox: ListOutbox, stage: str):
    """One bad entry is put aside, under the kind of its actor, whose Redis user may write no other; those after it
    arrive, and nothing stays in the mailbox."""
    server, names = MemoryServer(), Names()
    bus = MemoryBus(server)
    inbox = Inbox(bus, names, "me", outbox, IngressMetrics(Metrics()), get_logger(), stage=stage)
    running = asyncio.create_task(inbox.run())
    await inbox.mailbox.keep()
    call = ask(inbox, "a")
    server.publish(names.replies("me"), {b"h": b"garbage"})
    await bus.publish([(names.replies("me"), StopSequence(request_id="a", sequence_id=1))])
    await bus.publish([(names.replies("me"), batch([Delta("a", "x", 1, finish_reason="stop")]))])

    await call.finished()
    await until_empty(bus, names.replies("me"))

    assert await bus.length(names.dead_letters(stage)) == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_text_that_is_made_anew_is_not_told_twice(inbox: Inbox):
    """A replay begins at its beginning: what has come is cut off, to the character."""
    call = ask(inbox, "a")
    inbox.deliver(batch([Delta("a", "one t", 2, text_offset=0)]))
    (choice,) = await call.changes()
    assert choice.take_text() == "one t"
    inbox.deliver(batch([Delta("a", "one", 1, text_offset=0)]))
    inbox.deliver(batch([Delta("a", "one two three", 3, text_offset=0)]))
    inbox.deliver(batch([Delta("a", " four", 4, text_offset=13, finish_reason="stop")]))

    (choice,) = await call.changes()

    assert (choice.take_text(), choice.num_tokens, choice.finish_reason) == ("wo three four", 4, "stop")


async def test_an_attempt_that_comes_to_nothing_ends_itself_only(inbox: Inbox):
    """What is said of the one before it is passed over."""
    message = GenerateRequest(request_id="a", ingress="me", sampling=SamplingParams(), prompt="x", attempt="second")
    call = inbox.submit([message], streaming=True)
    failed = RequestFailed(request_id="a", status=503, error_type="server_error", message="elsewhere", attempt="first")
    inbox.deliver(failed)
    assert inbox.num_open == 1
    inbox.deliver(replace(failed, attempt="second"))
    assert inbox.num_open == 0
    with pytest.raises(ApiError) as caught:
        await call.changes()
    assert caught.value.status == 503


@pytest.mark.parametrize("attempt", ["", "second"])
async def test_a_choice_that_ends_before_its_prompt_is_told_waits_for_it(inbox: Inbox, attempt: str):
    """What is told again of several choices may come in this order: the first one is computed anew for the prompt's log
    probabilities, the second has ended long ago. Nothing is told twice, so its end is kept."""
    sampling = SamplingParams(n=2, echo=True, prompt_logprobs=1)
    message = GenerateRequest(request_id="a", ingress="me", sampling=sampling, prompt="x", attempt=attempt)
    call = inbox.submit([message], streaming=True)
    inbox.deliver(batch([Delta("a", "two", 1, choice_index=1, text_offset=0)]))
    inbox.deliver(batch([Delta("a", " three", 2, choice_index=1, text_offset=3, finish_reason="stop")]))
    first, second = call.choices
    assert (second.finish_reason, call.failure) == (None, None)

    inbox.deliver(PromptReply(request_id="a", text="x"))
    assert (second.take_text(), second.num_tokens, second.finish_reason) == ("two three", 2, "stop")
    inbox.deliver(batch([Delta("a", "one", 1, text_offset=0, finish_reason="stop")]))
    assert first.finish_reason == "stop"
    assert call.done


async def test_an_answer_without_its_prompt_is_an_error(inbox: Inbox):
    """The choice that tells the prompt has ended without it: it will not come any more."""
    sampling = SamplingParams(n=2, echo=True)
    call = inbox.submit([GenerateRequest(request_id="a", ingress="me", sampling=sampling, prompt="x")], streaming=True)
    inbox.deliver(batch([Delta("a", "one", 1, text_offset=0, finish_reason="stop")]))
    with pytest.raises(ApiError) as caught:
        await call.changes()
    assert caught.value.status == 500


async def test_what_was_on_its_way_to_a_lost_connection_makes_no_gap(inbox: Inbox):
    """A client comes back: it gets the answer from its beginning, when that is told again."""
    sampling = SamplingParams()
    message = GenerateRequest(request_id="a", ingress="me", sampling=sampling, prompt="x", attempt="second")
    call = inbox.submit([message], streaming=True)

    inbox.deliver(batch([Delta("a", " three", 3, text_offset=7, finish_reason="stop")]))
    assert not call.done
    inbox.deliver(batch([Delta("a", "one two three", 3, text_offset=0, finish_reason="stop")]))

    assert call.choices[0].take_text() == "one two three"
    assert call.done


async def test_the_end_is_confirmed_once_the_client_has_it(inbox: Inbox, outbox: ListOutbox):
    """A client that may come back has not, before it has come and gone with everything."""
    sampling = SamplingParams()
    request = GenerateRequest(request_id="a", ingress="me", sampling=sampling, prompt="x", attempt="1")
    lost = inbox.submit([request], streaming=True)
    inbox.deliver(batch([Delta("a", "x", 1, finish_reason="stop")]))
    outbox.sent.clear()
    inbox.close(lost, delivered=False)
    assert outbox.sent == []

    call = inbox.submit([replace(request, attempt="2")], streaming=True)
    inbox.deliver(batch([Delta("a", "x", 1, finish_reason="stop", text_offset=0)]))
    inbox.close(call, delivered=True)

    assert outbox.sent[-1] == ("control", RequestsDone(request_ids=("a",), attempts=("2",)))
    assert inbox.num_open == 0


def test_batches_are_int32():
    """The helper of these tests makes what the bus carries."""
    assert batch([Delta("a", "x", 1)]).num_output_tokens.dtype == np.int32
