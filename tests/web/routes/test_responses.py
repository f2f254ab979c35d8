"""Responses, spoken by OpenAI's client: whole, streamed, kept, continued, in the background and resumed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import CancelRequest, RequestFailed
from pagebus.bus.streams import RESPONSES_GROUP
from pagebus.web.adapters.response_events import ResponseEvents, new_response
from pagebus.web.adapters.response_input import read_response
from pagebus.web.http.errors import ApiError
from tests.helpers.waiting import until, until_empty
from tests.web.fake_backend import MODEL, SENTENCE, Served, num_prompt_tokens, start_served

TEXT = "".join(SENTENCE)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = MemoryServer()
    started = await start_served(lambda: MemoryBus(server))
    yield started
    await started.stop()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as made:
        yield made


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    """Wait for the end of a background response."""
    while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        pass
    return response


async def test_a_response(served: Served, client: openai.AsyncOpenAI) -> None:
    """To a string, with instructions; its input can be read, and it can be forgotten."""
    response = await client.responses.create(
        model=MODEL.name, input="What is a dog?", instructions="Be brief.", max_output_tokens=20,
        metadata={"for": "test"}, temperature=0.5,
    )  # fmt: skip
    assert (response.output_text, response.status, response.metadata) == (TEXT, "completed", {"for": "test"})
    assert response.usage is not None
    assert response.usage.output_tokens == len(SENTENCE)
    (request,) = served.backend.requests
    roles = [(each["role"], each["content"]) for each in request.messages or ()]
    assert roles == [("system", "Be brief."), ("user", "What is a dog?")]
    assert (request.sampling.max_tokens, request.sampling.temperature) == (20, 0.5)

    assert (await client.responses.retrieve(response.id)).output_text == TEXT
    items = await client.responses.input_items.list(response.id)
    assert [(item.role, item.content[0].text) for item in items.data] == [("user", "What is a dog?")]
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_pages_of_input_items(client: openai.AsyncOpenAI) -> None:
    """In either order, from any item on."""
    texts = ["one", "two", "three"]
    items = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts, strict=True)]
    response = await client.responses.create(model=MODEL.name, input=items)  # type: ignore[arg-type]
    for order, expected in (("asc", texts), ("desc", texts[::-1])):
        first = await client.responses.input_items.list(response.id, order=order, limit=2)  # type: ignore[arg-type]
        assert first.has_more
        found = [item.content[0].text async for item in first]
        assert found == expected
        (said,) = [item.content[0] async for item in first if item.role == "assistant"]
        assert (said.type, said.annotations) == ("output_text", [])
    with pytest.raises(openai.BadRequestError, match="limit"):
        await client.responses.input_items.list(response.id, limit=1000)


async def test_an_incomplete_response(client: openai.AsyncOpenAI) -> None:
    """One that was cut says why, and which item was."""
    response = await client.responses.create(model=MODEL.name, input="x", max_output_tokens=2, store=False)
    assert [response.status, *(item.status for item in response.output)] == ["incomplete", "incomplete"]
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_a_stream(client: openai.AsyncOpenAI) -> None:
    """Events are numbered without a gap, in OpenAI's order, and add up to the response."""
    stream = await client.responses.create(model=MODEL.name, input="x", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert events[-1].response.output_text == TEXT


async def test_a_conversation_goes_on(served: Served, client: openai.AsyncOpenAI) -> None:
    """Behind a previous response, without its instructions; twice in a row."""
    first = await client.responses.create(model=MODEL.name, input="one", instructions="Be brief.")
    second = await client.responses.create(model=MODEL.name, input="two", previous_response_id=first.id)
    await client.responses.create(model=MODEL.name, input="three", previous_response_id=second.id)
    told = [(each["role"], each["content"]) for each in served.backend.requests[-1].messages or ()]
    assert told == [("user", "one"), ("assistant", TEXT), ("user", "two"), ("assistant", TEXT), ("user", "three")]
    with pytest.raises(openai.NotFoundError, match=r"'resp_none' not found\. Responses are kept for 3600 s\."):
        await client.responses.create(model=MODEL.name, input="x", previous_response_id="resp_none")


async def test_the_tokens_of_an_input_are_counted(served: Served, client: openai.AsyncOpenAI) -> None:
    """With instructions, tools and what was said before, whatever the answer is to be; nothing is generated or kept."""
    first = await client.responses.create(model=MODEL.name, input="Hello", instructions="Be brief.")
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    counted = await client.responses.input_tokens.count(
        model=MODEL.name, input="And now?", instructions="Be kind.", previous_response_id=first.id, tools=[tool],
        text={"format": {"type": "json_object"}}, extra_body={"temperature": 0},
    )  # fmt: skip
    request = served.backend.requests[-1]
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", num_prompt_tokens(request))
    told = [each["content"] for each in request.messages or ()]
    assert (told, request.tokens_only) == (["Be kind.", "Hello", TEXT, "And now?"], True)
    assert [each["function"]["name"] for each in request.tools or ()] == ["f"]
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(model=MODEL.name, input="x", previous_response_id="resp_0")


async def test_in_the_background(client: openai.AsyncOpenAI) -> None:
    """Queued at once, there later; its events can be read from any number on, again and again."""
    response = await client.responses.create(model=MODEL.name, input="x", background=True)
    assert response.status == "queued"
    assert (await ended(client, response.id)).output_text == TEXT
    events = [event async for event in await client.responses.retrieve(response.id, stream=True)]
    assert events[-1].type == "response.completed"
    for after in (0, 3, len(events) - 2):
        rest = [
            event async for event in await client.responses.retrieve(response.id, stream=True, starting_after=after)
        ]
        assert [event.sequence_number for event in rest] == list(range(after + 1, len(events)))
    for after in (len(events) - 1, 999_999_999):
        (last,) = [
            event async for event in await client.responses.retrieve(response.id, stream=True, starting_after=after)
        ]
        assert last == events[-1]
    for wrong in ("--5", "²", "1.5", "9" * 10):
        with pytest.raises(openai.BadRequestError, match="starting_after"):
            await client.responses.retrieve(response.id, extra_query={"stream": "true", "starting_after": wrong})
    for name in ("stream", "include_obfuscation"):
        with pytest.raises(openai.BadRequestError, match=f"{name}: must be true or false"):
            await client.responses.retrieve(response.id, extra_query={name: "maybe"})


async def test_a_reader_comes_back(served: Served, client: openai.AsyncOpenAI) -> None:
    """A client that leaves a background stream in the middle reads the rest while it is computed."""
    served.backend.answers = False
    stream = await client.responses.create(model=MODEL.name, input="x", background=True, stream=True)
    (request,) = await served.backend.requested(1)
    await stream.close()
    await served.backend._answer(request)
    rest = [event async for event in await client.responses.retrieve(request.request_id, stream=True, starting_after=1)]
    assert rest[0].sequence_number == 2
    assert rest[-1].response.output_text == TEXT


async def test_a_background_response_is_cancelled(served: Served, client: openai.AsyncOpenAI) -> None:
    """The scheduler is told to end it; what is kept of it says so."""
    served.backend.answers = False
    response = await client.responses.create(model=MODEL.name, input="x", background=True)
    (request,) = await served.backend.requested(1)
    assert (await client.responses.cancel(response.id)).status == "cancelled"
    assert (await client.responses.retrieve(response.id)).status == "cancelled"
    await until(lambda: CancelRequest(request_id=response.id) in served.backend.queries)
    ended_by_us = RequestFailed(request_id=request.request_id, status=503, error_type="", message="ended")
    await served.backend.send(request.ingress, ended_by_us)
    assert (await ended(client, response.id)).status == "cancelled"


async def test_a_refused_background_response_fails(client: openai.AsyncOpenAI) -> None:
    """What is wrong with it is told by what is kept of it."""
    response = await client.responses.create(model=MODEL.name, input="word " * 600, background=True)
    failed = await ended(client, response.id)
    assert (failed.status, failed.error.code) == ("failed", "invalid_prompt")


@pytest.mark.parametrize("taken", [False, True], ids=["ours", "taken over"])
async def test_a_background_response_that_is_asked_for_elsewhere(
    served: Served, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """It does not fail: it is left to the ingress that has taken it over, or else asked for again."""
    monkeypatch.setattr("pagebus.web.routes.generate.background.ELSEWHERE_S", 0.05)
    served.backend.answers = False
    made = await client.responses.create(model=MODEL.name, input="x", background=True)
    (first,) = await served.backend.requested(1)
    bus, stream, name = served.backend.bus, served.actor.names.responses, served.actor.name
    assert served.actor.context is not None
    running = served.actor._background._running
    if taken:
        await bus.acquire_lease("ingress", "other", {}, ttl_s=60)
        await bus.claim(stream, RESPONSES_GROUP, "other", name)
    elsewhere = RequestFailed(
        request_id=first.request_id, status=503, error_type="", message="elsewhere", attempt=first.attempt
    )
    await served.backend.send(first.ingress, elsewhere)
    if taken:
        await until(lambda: not running)
        assert (await bus.consumers(stream, RESPONSES_GROUP))["other"] == 1
        assert (await client.responses.retrieve(made.id)).status in ("queued", "in_progress")
    else:
        _, second = await served.backend.requested(2)
        await served.backend._answer(second)
        assert (await ended(client, made.id)).output_text == TEXT


async def test_places_for_background_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many one key has queued, there is a place for another key's; all end, in the order of each key."""
    monkeypatch.setattr("pagebus.web.routes.generate.background.MAX_RUNNING", 4)
    server = MemoryServer()
    served = await start_served(lambda: MemoryBus(server), answers=False, api_key=("one", "two"))
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="one", max_retries=0) as mine:
        yours = mine.with_options(api_key="two")
        made = [await mine.responses.create(model=MODEL.name, input=f"{i}", background=True) for i in range(7)]
        await served.backend.requested(2)
        other = await yours.responses.create(model=MODEL.name, input="x", background=True)
        asked = await served.backend.requested(3)
        assert [request.request_id for request in asked] == [made[0].id, made[1].id, other.id]
        assert len(served.actor._background._running) == 3
        await served.backend._answer(asked[2])
        assert (await ended(yours, other.id)).output_text == TEXT
        for number, response in enumerate(made):
            asked = await served.backend.requested(number + 2)
            request = next(each for each in asked if each.request_id == response.id)
            await served.backend._answer(request)
            assert (await ended(mine, response.id)).output_text == TEXT
        assert [each.request_id for each in asked if each.client == "key 0"] == [each.id for each in made]
        await until_empty(served.backend.bus, served.actor.names.responses)
    await served.stop()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True, "store": False}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"nonsense": 1}, "nonsense"),
        ({"metadata": {"n" * 65: "x"}}, "metadata"),
        ({"include": ["message.output_text.logprobs", "everything"]}, "include[1]"),
    ],
)
def test_fields_that_are_refused(change: dict[str, Any], param: str) -> None:
    """Each by its name."""
    with pytest.raises(ApiError) as caught:
        read_response({"input": "x"} | change)
    assert caught.value.param == param


def test_types_that_are_refused_are_told() -> None:
    """No default would help."""
    for tool, problem in (({"type": "web_search"}, "'web_search' is not supported"), ({}, "is required")):
        with pytest.raises(ApiError, match=f"^tools.0..type: {problem}$"):
            read_response({"input": "x", "tools": [tool]})


def test_tools_and_formats_become_a_chats() -> None:
    """Written flat here, nested there; calls and their results are messages."""
    wanted = read_response(
        {
            "input": [
                {"role": "user", "content": "How warm?"},
                {"type": "reasoning", "id": "r", "summary": []},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "21"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True, "description": None}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
            "reasoning": {"effort": "low", "summary": "auto"},
        }
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert wanted.chat["messages"] == [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "21"},
    ]
    assert wanted.chat["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]
    assert wanted.chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert wanted.chat["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert wanted.chat["reasoning_effort"] == "low"


DELTAS: tuple[dict[str, Any], ...] = (
    {"reasoning": "Hm."},
    {"content": "So."},
    {"content": " Now."},
    {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
    {"tool_calls": [{"index": 1, "id": "d", "function": {"name": "f", "arguments": "{"}}]},
    {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
)


def chunk_of(delta: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


@pytest.mark.parametrize("place", range(len(DELTAS) + 1))
def test_events_go_on_where_others_ended(place: int) -> None:
    """Whoever has followed what was told tells what comes next, as if it had told everything."""
    first, told = ResponseEvents(new_response("r", "m", {})), []
    told += first.begin()
    for delta in DELTAS[:place]:
        told += first.chunk(chunk_of(delta))
    second = ResponseEvents({**new_response("r", "m", {}), "created_at": first.response["created_at"]})
    for event in told:
        second.follow(json.loads(json.dumps(event)))
    assert second.response == first.response
    assert second.begun

    rest: list[list[dict[str, Any]]] = []
    for events in (first, second):
        rest.append([event for delta in DELTAS[place:] for event in events.chunk(chunk_of(delta))])
        rest[-1] += events.end()
    assert [shape(event) for event in rest[0]] == [shape(event) for event in rest[1]]
    assert first.messages() == second.messages()
    assert second.is_over


def shape(event: dict[str, Any]) -> tuple[Any, ...]:
    """All of an event but the random ids of items."""
    return event["type"], event["sequence_number"], event.get("output_index"), event.get("delta"), event.get("text")


def test_calls_and_thoughts_become_items() -> None:
    """One at a time; the conversation goes on with the calls, without the thoughts."""
    events, told = ResponseEvents(new_response("r", "m", {})), []
    for delta in (
        {"reasoning": "Hm."},
        {"content": "So."},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
    ):
        told += events.chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    told += events.end()
    assert [item["type"] for item in events.response["output"]] == ["reasoning", "message", "function_call"]
    assert {item["status"] for item in events.response["output"]} == {"completed"}
    assert [each["type"] for each in told].count("response.output_item.done") == 3
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert events.messages() == [{"role": "assistant", "content": "So.", "tool_calls": [call]}]
