"""Every error a client can meet, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import pytest
from yarl import URL

from pagebus.bus.messages import RequestFailed
from pagebus.web.answers.endpoints import Completion
from pagebus.web.http.limits import MANY_PROMPTS, TURN_BODY_BYTES
from pagebus.web.requests.parsed_request import ParsedRequest
from tests.web.fake_backend import Delta, batch


async def post(http, served, path="/v1/completions", **options):
    async with http.post(served.url + path, **options) as response:
        return response.status, json.loads(await response.read()), response.headers


def shape(body: dict) -> dict:
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code", "reason"]
    return body["error"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b'{"prompt": "x", "n": 0}', 400, "invalid_value"),
        (b'{"prompt": "x", "frobnicate": 1}', 400, "unknown_parameter"),
        (b'{"prompt": "x", "suffix": "y"}', 400, "unsupported_parameter"),
        (b'{"prompt": "x", "model": "y"}', 404, "model_not_found"),
    ],
)
async def test_bad_bodies(serve, http, body, status, code):
    """The status and the code say what is wrong; nothing reaches the bus."""
    served = await serve()

    got, answer, headers = await post(http, served, data=body, headers={"X-Request-Id": "r"})

    assert (got, shape(answer)["reason"]) == (status, code)
    assert headers["X-Request-Id"] == "r"
    assert served.backend.requests == []


async def test_content_type_is_not_looked_at(serve, http):
    """JSON is JSON, whatever it is called."""
    served = await serve()

    status, _, _ = await post(http, served, data=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})

    assert status == 200


async def test_body_limits(serve, http):
    """A body that is too large is a 413, declared or not; an encoded one is a 415."""
    served = await serve()
    served.actor.context.bodies.max_bytes = 1000

    async def chunks():
        yield b"x" * 900
        yield b"x" * 2**23

    assert (await post(http, served, data=b"x" * 1001))[0] == 413
    assert (await post(http, served, data=chunks()))[0] == 413
    status, answer, _ = await post(http, served, data=b"x", headers={"Content-Encoding": "gzip"})
    assert (status, shape(answer)["reason"]) == (415, "unsupported_encoding")


async def test_very_many_arrays(serve, http):
    """A body of little else takes so long to make that nothing else would be done: it is refused before it is."""
    served = await serve()
    served.actor.context.bodies.max_bytes = 1600

    for count, code in ((100, "unknown_parameter"), (101, "invalid_json")):
        body = '{"prompt": "x", "odd": [' + ",".join(["[]"] * (count - 2)) + "]}"
        status, answer, _ = await post(http, served, data=body)
        assert (status, shape(answer)["reason"]) == (400, code)


async def test_long_bodies_and_answers_are_worked_on_beside_the_loop(serve, http, monkeypatch):
    """Others go on meanwhile; short ones wait for no thread."""
    served, threads = await serve(), []

    def note(work):
        def noted(*args):
            threads.append(threading.current_thread() is threading.main_thread())
            return work(*args)

        return noted

    monkeypatch.setattr(Completion, "parse", staticmethod(note(Completion.parse)))
    monkeypatch.setattr(Completion, "answer", note(Completion.answer))
    monkeypatch.setattr(ParsedRequest, "messages_for_bus", note(ParsedRequest.messages_for_bus))
    short, long = {"prompt": [5], "logprobs": 1}, {"prompt": [5] * 100_000, "logprobs": 1}
    assert (await post(http, served, json=short))[0] == 200
    assert (await post(http, served, json=long))[0] == 400
    monkeypatch.setattr("pagebus.web.routes.generate.generation.LONG_ANSWER_NUMBERS", 1)
    assert (await post(http, served, json=short))[0] == 200
    assert (await post(http, served, json={"prompt": ["x"] * (MANY_PROMPTS + 1)}))[0] == 200

    on_loop, read_beside, told_beside = [True, True, True], [False, True], [True, True, False]
    assert threads == [*on_loop, *read_beside, *told_beside, True, False, False]


@pytest.mark.parametrize("begin", [b"{", b"{" + b" " * TURN_BODY_BYTES])
async def test_slow_body(serve, http, monkeypatch, begin):
    """A body that does not come to its end is a 408, and holds up nobody."""
    monkeypatch.setattr("pagebus.web.access.arrival.BODY_TIMEOUT_S", 0.01)
    served = await serve()
    gate = asyncio.Event()

    async def chunks():
        yield begin
        await gate.wait()

    asking = asyncio.create_task(post(http, served, data=chunks()))
    status, answer, _ = await asking
    gate.set()
    assert served.actor.context.bodies.turns.num_waiting().total() == 0

    assert (status, shape(answer)["reason"]) == (408, "body_timeout")


async def test_no_such_route(serve, http):
    """Unknown paths and wrong methods have the same shape."""
    served = await serve()

    status, answer, _ = await post(http, served, "/v1/images/generations", data=b"{}")
    assert (status, shape(answer)["type"]) == (404, "NotFoundError")
    async with http.get(served.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        shape(await response.json())


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "Did you mean /v1/chat/completions? The base URL of OpenAI's clients ends in /v1."),
        ("/v1/v1/completions", "Did you mean /v1/completions?"),
        ("//v1/completions", "Did you mean /v1/completions?"),
        ("/v1/Completions/", "Did you mean /v1/completions?"),
        ("/v1/images/generations", "GET /docs lists all routes."),
    ],
)
@pytest.mark.parametrize(("root_path", "sent"), [(None, ""), ("/llm", "/llm"), ("/llm", "")])
async def test_a_path_that_is_no_route(serve, http, path, hint, root_path, sent):
    """The error says what was asked for, and which route may be meant, below a root path, too: also if a proxy takes
    that off."""
    served = await serve(root_path=root_path)

    url = URL(served.url + sent + path, encoded=True)
    async with http.post(url, data=b"{}", allow_redirects=False) as response:
        status, error = response.status, shape(await response.json())

    hint = re.sub("(mean |GET )/", rf"\1{root_path or ''}/", hint)
    expected = f"There is no route POST {url.path}. {hint}"
    assert (status, error["message"], error["reason"]) == (404, expected, "unknown_route")


async def test_a_slash_too_many(serve, http):
    """A redirect, as vLLM's server answers, after which clients send the same again; to a route of ours only."""
    served = await serve()

    assert (await post(http, served, "/v1/completions/", json={"prompt": "x"}))[0] == 200
    async with http.get(served.url + "/v1/models/?a=b", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (307, "/v1/models?a=b")
    below = await serve(root_path="/llm")
    for sent in ("", "/llm"):  # a proxy may take the root path off
        async with http.get(f"{below.url}{sent}/v1/models/?a=b", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (307, "/llm/v1/models?a=b")
    async with http.get(URL(served.url + "//elsewhere.example/", encoded=True), allow_redirects=False) as response:
        assert response.status == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (400, "BadRequestError", "invalid_value"),
        (503, "ServiceUnavailableError", "unavailable"),
        (200, "InternalServerError", "internal_error"),
    ],
)
async def test_failure_before_the_first_token(serve, http, stream, status, kind, reason):
    """What the system says about a request becomes the status of the response, streamed or not; nothing is aborted."""
    served = await serve(answers=False)
    asking = asyncio.create_task(post(http, served, json={"prompt": "x", "stream": stream}))
    (request,) = await served.backend.requested()
    failure = RequestFailed(request_id=request.request_id, status=status, error_type="x", message="no", param="prompt")

    await served.backend.send(served.address, failure)
    got, answer, headers = await asking

    assert got == (500 if status == 200 else status)
    assert answer == {"error": {"message": "no", "type": kind, "param": "prompt", "code": got, "reason": reason}}
    assert ("Retry-After" in headers) == (status == 503)
    assert served.actor.context.inbox.num_open == 0
    assert served.backend.aborts == []


async def test_failure_in_a_stream(serve, http):
    """After the first token an error is an event, and the stream still ends with [DONE]."""
    served = await serve(answers=False)
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "x", "stream": True}))
    (request,) = await served.backend.requested()
    await served.backend.send(served.address, batch([Delta(request.request_id, "a", 1)]))
    async with await asking as response:
        failed = request.request_id
        failure = RequestFailed(request_id=failed, status=500, error_type="InternalServerError", message="no")
        await served.backend.send(served.address, failure)
        events = (await response.text()).split("\n\n")

    error = {"message": "no", "type": "InternalServerError", "param": None, "code": 500, "reason": "internal_error"}
    assert json.loads(events[-3][6:]) == {"error": error}
    assert events[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 503)])
async def test_a_choice_that_ends_badly(serve, http, reason, status):
    """Ends that OpenAI's clients do not know are errors; the other choices of the request are aborted."""
    served = await serve(answers=False)
    asking = asyncio.create_task(post(http, served, json={"prompt": "x", "n": 2}))
    (request,) = await served.backend.requested()

    await served.backend.send(served.address, batch([Delta(request.request_id, "", 1, finish_reason=reason)]))

    got, answer, _ = await asking
    assert got == status
    shape(answer)
    assert await served.backend.aborted() == [request.request_id]


async def test_one_of_many_prompts_fails(serve, http):
    """The call fails as a whole, and the other prompts are aborted."""
    served = await serve(answers=False)
    asking = asyncio.create_task(post(http, served, json={"prompt": ["a", "b", "c"]}))
    requests = await served.backend.requested(3)
    failure = RequestFailed(request_id=requests[1].request_id, status=400, error_type="BadRequestError", message="no")

    await served.backend.send(served.address, failure)

    assert (await asking)[0] == 400
    assert await served.backend.aborted(2) == [requests[0].request_id, requests[2].request_id]


async def test_too_long(serve, http):
    """OpenAI's clients look for the code of a context that is too long."""
    served = await serve()

    status, answer, _ = await post(http, served, json={"prompt": "word " * 600})

    assert (status, shape(answer)["reason"], answer["error"]["param"]) == (400, "context_length_exceeded", "prompt")


async def test_overload(serve, http):
    """More open requests than allowed is a 429 that says when to come again."""
    served = await serve(answers=False, max_num_queued_requests=2)
    asking = asyncio.create_task(post(http, served, json={"prompt": ["a", "b"]}))
    requests = await served.backend.requested(2)

    status, answer, headers = await post(http, served, json={"prompt": "c"})

    assert (status, shape(answer)["type"], headers["Retry-After"]) == (429, "RateLimitError", "1")
    await served.backend.send(
        served.address, batch(Delta(r.request_id, "x", 1, finish_reason="stop") for r in requests)
    )
    assert (await asking)[0] == 200


async def test_a_bug_is_a_500_without_details(serve, http, monkeypatch):
    """An unexpected exception tells the client nothing but that it happened."""
    served = await serve()
    monkeypatch.setattr(served.actor.context.inbox, "submit", lambda *_, **__: {}["secret"])

    status, answer, _ = await post(http, served, json={"prompt": "x"})

    assert (status, shape(answer)["type"]) == (500, "InternalServerError")
    assert "secret" not in json.dumps(answer)
