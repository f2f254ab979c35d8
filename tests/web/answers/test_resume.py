"""Clients that come back for the rest of an answer."""

from __future__ import annotations

import asyncio

import aiohttp
import orjson
import pytest

from pagebus.bus.messages import RequestFailed
from tests.helpers.waiting import until
from tests.web.fake_backend import Delta, batch

BODY = {"prompt": "x", "max_tokens": 50, "stream": True}
KEY = {"Idempotency-Key": "order 66"}


async def events(response: aiohttp.ClientResponse) -> tuple[str, str, bool]:
    """The text, the last event id, and whether the stream came to its end."""
    text, last, done = "", "", False
    async for line in response.content:
        if line.startswith(b"id: "):
            last = line[4:].decode().strip()
        elif line.startswith(b"data: [DONE]"):
            done = True
        elif line.startswith(b"data: "):
            text += orjson.loads(line[6:])["choices"][0]["text"]
    return text, last, done


async def test_a_stream_goes_on_behind_the_last_event(serve, http):
    """The connection breaks; the same request with the last event's id gets the rest, exactly once."""
    served = await serve(answers=False)
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json=BODY, headers=KEY))
    (first,) = await served.backend.requested()
    await served.backend.send(first.ingress, batch([Delta(first.request_id, "one t", 2, text_offset=0)]))
    async with await asking as response:
        line = b""
        while not line.startswith(b"id: "):
            line = await response.content.readline()
    last = line[4:].decode().strip()
    await served.backend.aborted()
    assert served.backend.left == [first.request_id]

    headers = {**KEY, "Last-Event-ID": last}
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json=BODY, headers=headers))
    _, again = await served.backend.requested(2)
    assert (again.request_id, again.attempt != first.attempt) == (first.request_id, True)
    assert again.shared, "who reads it at another ingress would be cut off"
    replay = Delta(again.request_id, "one two", 3, text_offset=0, finish_reason="stop")
    await served.backend.send(again.ingress, batch([replay]))
    async with await asking as response:
        assert await events(response) == ("wo", "3.7.!1", True)
    await until(lambda: served.backend.done == [first.request_id])


async def test_an_end_is_told_once(serve, http):
    """A client that lost the connection between the end of a choice and that of the stream gets only the latter."""
    served = await serve(answers=False)
    headers = {**KEY, "Last-Event-ID": "3.7.,2.1"}
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json={**BODY, "n": 2}, headers=headers))
    (sent,) = await served.backend.requested()
    one = Delta(sent.request_id, "one two", 3, text_offset=0, finish_reason="stop")
    two = Delta(sent.request_id, "xyz", 3, choice_index=1, text_offset=0, finish_reason="stop")
    await served.backend.send(sent.ingress, batch([one, two]))
    async with await asking as response:
        assert await events(response) == ("yz", "3.7.,3.3.!1", True)


@pytest.mark.parametrize(("last", "text"), [("2.1", "ne two"), ("2.0", "one two"), ("9.9", ""), ("1.6", "o")])
async def test_an_id_that_is_of_no_event_gets_an_end_all_the_same(serve, http, last, text):
    """Tokens and characters that do not belong together: the text from that character on, and never a wait for ever."""
    served = await serve(answers=False)
    headers = {**KEY, "Last-Event-ID": last}
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json=BODY, headers=headers))
    (sent,) = await served.backend.requested()
    await served.backend.send(sent.ingress, batch([Delta(sent.request_id, "one t", 2, text_offset=0)]))
    end = Delta(sent.request_id, "wo", 3, text_offset=5, finish_reason="stop")
    await served.backend.send(sent.ingress, batch([end]))
    async with await asking as response:
        told, _, done = await events(response)
    assert (told, done) == (text, True)


async def test_a_whole_answer_can_be_asked_for_again(serve, http):
    """Without streaming a repeat has the same id and gets the same answer."""
    served = await serve()
    body = {"prompt": "x", "max_tokens": 5}
    answers = []
    for _ in range(2):
        async with http.post(served.url + "/v1/completions", json=body, headers=KEY) as response:
            answers.append(await response.json())
    first, second = ({**answer, "created": 0} for answer in answers)
    assert first == second


async def test_each_client_has_idempotency_keys_of_its_own(serve, http):
    """The same one sent with another API key is another request, however that key is sent."""
    served = await serve(api_key=("first-key", "second-key"))
    headers = [{"x-api-key": "first-key"}, {"Authorization": "Bearer first-key"}, {"x-api-key": "second-key"}]
    ids = []
    for own in headers:
        body = {"prompt": "x", "max_tokens": 5}
        async with http.post(served.url + "/v1/completions", json=body, headers={**KEY, **own}) as response:
            ids.append((await response.json())["id"])
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]


async def test_several_connections_read_one_answer(serve, http):
    """The same request while it is under way, as a stream and as a whole answer: each gets all of it."""
    served = await serve(answers=False)
    url, backend = served.url + "/v1/completions", served.backend

    def ask(**changes: object) -> asyncio.Task[aiohttp.ClientResponse]:
        return asyncio.create_task(http.post(url, json=BODY | changes, headers=KEY))

    first = ask()
    (one,) = await backend.requested()
    await backend.send(one.ingress, batch([Delta(one.request_id, "one t", 2, text_offset=0)]))
    second = ask()
    await backend.requested(2)
    third = ask(stream=False)
    sent = await backend.requested(3)
    assert len({each.attempt for each in sent}) == 3
    await backend.send(one.ingress, batch([Delta(one.request_id, "one two th", 3, text_offset=0)]))
    await backend.send(one.ingress, batch([Delta(one.request_id, "ree", 4, text_offset=10, finish_reason="stop")]))
    for task in (first, second):
        async with await task as response:
            assert await events(response) == ("one two three", "4.13.!1", True)
    async with await third as response:
        assert (await response.json())["choices"][0]["text"] == "one two three"
    await until(lambda: backend.done == [one.request_id])
    assert (backend.aborts, served.actor.context.inbox.num_open) == ([], 0)


@pytest.mark.parametrize("newer_leaves", [True, False])
async def test_a_reader_that_leaves_ends_nothing_for_the_other(serve, http, newer_leaves):
    """The request is not aborted before both have gone."""
    served = await serve(answers=False)
    asking = []
    for count in (1, 2):
        asking.append(asyncio.create_task(http.post(served.url + "/v1/completions", json=BODY, headers=KEY)))
        await served.backend.requested(count)
    inbox = served.actor.context.inbox
    gone, stays = asking[::-1] if newer_leaves else asking
    gone.cancel()
    await until(lambda: not inbox._readers.earlier)
    assert (inbox.num_open, served.backend.aborts) == (1, [])
    one, last = served.backend.requests
    end = Delta(one.request_id, "y", 1, text_offset=0, finish_reason="stop")
    await served.backend.send(last.ingress, batch([end]))
    async with await stays as response:
        assert await events(response) == ("y", "1.1.!1", True)
    assert served.backend.aborts == []


async def test_another_request_under_the_same_key_does_not_disturb(serve, http):
    """It is a 422, and who was first gets the answer."""
    served = await serve(answers=False)
    url = served.url + "/v1/completions"
    first = asyncio.create_task(http.post(url, json=BODY, headers=KEY))
    (sent,) = await served.backend.requested()
    async with http.post(url, json={**BODY, "prompt": "y"}, headers=KEY) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"], error["reason"]) == (422, "Idempotency-Key", "idempotency_key_in_use")
    end = Delta(sent.request_id, "y", 1, text_offset=0, finish_reason="stop")
    await served.backend.send(sent.ingress, batch([end]))
    async with await first as response:
        assert (await events(response))[0] == "y"


async def test_a_failure_is_for_all_readers(serve, http):
    """None of them waits for what will never come."""
    served = await serve(answers=False)
    asking = []
    for count in (1, 2):
        asking.append(asyncio.create_task(http.post(served.url + "/v1/completions", json=BODY, headers=KEY)))
        await served.backend.requested(count)
    last = served.backend.requests[-1]
    failed = RequestFailed(request_id=last.request_id, status=400, error_type="BadRequestError", message="no")
    await served.backend.send(last.ingress, failed)
    for task in asking:
        async with await task as response:
            assert response.status == 400
    assert served.actor.context.inbox.num_open == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"Last-Event-ID": "1.2"},
        {**KEY, "Last-Event-ID": "nonsense"},
        {**KEY, "Last-Event-ID": "1.2,3.4"},
        {"Idempotency-Key": "k" * 256},
    ],
)
async def test_headers_that_make_no_sense(serve, http, headers):
    """A 400 that names the header."""
    served = await serve()
    async with http.post(served.url + "/v1/completions", json=BODY, headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"] in headers) == (400, True)


async def test_plain_streams_have_no_event_ids(serve, http):
    """Clients that split events by hand find nothing but data."""
    served = await serve()
    async with http.post(served.url + "/v1/completions", json=BODY) as response:
        lines = [line async for line in response.content if line.strip()]
    assert all(line.startswith(b"data: ") for line in lines)


async def test_who_leaves_and_may_come_back_counts(serve, http, tmp_path):
    """A key that leaves one call after the other has no more under way than it may; each can be taken up again."""
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkey = "alices-long-secret"\nmax_requests = 1\n')
    served = await serve(answers=False, api_key_file=str(path))
    alice = {"Authorization": "Bearer alices-long-secret"}
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json=BODY, headers={**KEY, **alice}))
    await served.backend.requested()
    asking.cancel()
    await served.backend.aborted()
    for headers in (alice, {**alice, "Idempotency-Key": "order 67"}):
        async with http.post(served.url + "/v1/completions", json=BODY, headers=headers) as response:
            assert response.status == 429

    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json=BODY, headers={**KEY, **alice}))
    _, again = await served.backend.requested(2)
    await served.backend.send(
        again.ingress, batch([Delta(again.request_id, "y", 1, text_offset=0, finish_reason="stop")])
    )
    async with await asking as response:
        assert (await events(response))[2]
    served.backend.answers = True
    async with http.post(served.url + "/v1/completions", json=BODY, headers=alice) as response:
        assert response.status == 200
