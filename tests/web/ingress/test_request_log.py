"""Lines about requests: what is in them, and that prompts are in them only where that was asked for."""

from __future__ import annotations

import asyncio

import pytest

from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.messages import RequestFailed
from tests.helpers.waiting import until
from tests.web.fake_backend import Delta, batch

PROMPT = 'a "quoted"\nline\x1b[2J ' + "and more " * 60


async def ask(http, served, path="/v1/completions", **body):
    async with http.post(served.url + path, json=body) as response:
        assert response.status == 200, await response.text()


def told(lines, *names):
    return [[line.get(name) for name in names] for line in lines() if line["event"] == "request received"]


@pytest.mark.parametrize(
    ("max_log_len", "shown"), [(None, [PROMPT, "[5, 6, 7]"]), (12, [PROMPT[:12], "[5, 6, 7]"]), (2, ["a ", "[5, 6]"])]
)
async def test_prompts(serve, http, lines, max_log_len, shown):
    """On one line with the parameters, as a value that can be read back; as much of it as may be."""
    served = await serve(enable_log_requests=True, log_level="debug", max_log_len=max_log_len)
    await ask(http, served, prompt=PROMPT, max_tokens=3, temperature=0, stop=["secret"])
    await ask(http, served, prompt=[5, 6, 7])
    texts = [text.replace("\n", "\\n").replace("\x1b", "\\x1b") for text in shown]
    params = ["max_tokens=3 temperature=0.0", ""]
    assert told(lines, "prompt", "params") == [list(pair) for pair in zip(texts, params, strict=True)]
    assert not any("secret" in str(line) for line in lines())


async def test_chats(serve, http, lines):
    """Messages as JSON."""
    served = await serve(enable_log_requests=True, log_level="debug", max_log_len=32)
    await ask(http, served, "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    assert told(lines, "prompt") == [['[{"role":"user","content":"hello"}]'[:32]]]


async def test_no_prompt_unless_asked_for(serve, http, lines):
    """At the usual level only the parameters are told."""
    served = await serve(enable_log_requests=True)
    await ask(http, served, prompt=PROMPT, n=2)
    assert told(lines, "prompt", "params") == [[None, "n=2"]]
    assert "and more" not in str(lines())


async def test_nothing_by_default(serve, http, lines):
    """Neither of requests nor of answers, whatever the level."""
    served = await serve(log_level="debug")
    await ask(http, served, prompt=PROMPT)
    assert not [line for line in lines() if line["event"].startswith("request")]
    assert "and more" not in str(lines())


async def test_answers(serve, http, lines):
    """Routes whose answers nobody wants to see are left out."""
    served = await serve(enable_log_requests=True, disable_access_log_for_endpoints="/health, /metrics")
    for path in ("/health", "/metrics", "/version", "/v1/models"):
        async with http.get(served.url + path):
            pass
    ends = [(line["handler"], line["status"]) for line in lines() if line["event"] == "request"]
    assert ends == [("/version", 200), ("/v1/models", 200)]


ROUTES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "stream": True},
    "/v1/embeddings": {"input": ["x", "y"]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/v1/responses": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/v1/completions/render": {"prompt": ["x", "y", "z"]},
}


@pytest.mark.parametrize("headers", [{}, {"X-Request-Id": "mine"}, {"Idempotency-Key": "again"}])
@pytest.mark.parametrize("path", ROUTES)
async def test_one_id(serve, http, lines, path, headers):
    """Of a request on the bus and of its end; what the client can name is in it, or beside it."""
    served = await serve(enable_log_requests=True)
    async with http.post(served.url + path, json=ROUTES[path], headers=headers) as response:
        await response.read()
        seen = response.headers["X-Request-Id"]
    await served.stop()
    received = [line["request_id"] for line in lines() if line["event"] == "request received"]
    (end,) = (line for line in lines() if line["event"] == "request")
    assert received == [request.request_id for request in served.backend.requests]
    assert (end["request_id"], end.get("requests", 1)) == (received[0], len(received))
    assert (end.get("x_request_id") == seen) is (seen not in received[0])


async def test_one_id_of_what_fails(serve, http, lines):
    """Before it is sent it has none but the client's."""
    served = await serve(enable_log_requests=True, answers=False)
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "x"}))
    (request,) = await served.backend.requested()
    failure = RequestFailed(request_id=request.request_id, status=503, error_type="", message="full")
    await served.backend.send(served.address, failure)
    (await asking).release()
    async with http.post(served.url + "/v1/completions", json={"prompt": {}}) as response:
        seen = response.headers["X-Request-Id"]
    await served.stop()
    said = [(line["event"], line["request_id"]) for line in lines() if line["event"].startswith("request")]
    sent = [(event, request.request_id) for event in ("request received", "request failed", "request")]
    assert said == [*sent, ("request", seen)]


async def test_outputs(serve, http, lines):
    """A line for each as it ends, streamed or not, at the usual level, cut; embeddings and tokens have none."""
    served = await serve(enable_log_requests=True, enable_log_outputs=True, max_log_len=8)
    await ask(http, served, prompt=PROMPT, n=2)
    await ask(http, served, prompt="x", stream=True, max_tokens=2)
    await ask(http, served, "/v1/chat/completions", messages=[{"role": "user", "content": "Say: a\nb"}])
    await ask(http, served, "/v1/embeddings", input="x")
    await ask(http, served, "/tokenize", prompt="x")
    await served.stop()
    names = ("index", "finish_reason", "tokens", "output")
    assert [[line[name] for name in names] for line in lines() if line["event"] == "output"] == [
        [0, "stop", 6, "Hello th"], [1, "stop", 7, "Hello th"], [0, "length", 2, "Hello th"], [0, "stop", 1, "a\\nb"]
    ]  # fmt: skip
    assert "and more" not in str(lines())


async def test_an_output_that_is_broken_off(serve, http, lines):
    """What had come of it is told, and that its client has left."""
    served = await serve(enable_log_requests=True, enable_log_outputs=True, answers=False)
    asking = asyncio.create_task(ask(http, served, prompt="x"))
    (request,) = await served.backend.requested()
    await served.backend.send(served.address, batch([Delta(request.request_id, "so far", 2)]))
    (opened,) = served.actor.context.inbox.open_requests()
    await until(lambda: opened.choices[0].num_tokens)
    asking.cancel()
    await served.backend.aborted()
    (line,) = (line for line in lines() if line["event"] == "output")
    assert (line["request_id"], line["output"], line["finish_reason"]) == (request.request_id, "so far", "abort")


async def test_no_output_unless_asked_for(serve, http, lines):
    """Whatever the level."""
    served = await serve(enable_log_requests=True, log_level="debug")
    await ask(http, served, prompt="x")
    assert "Hello" not in str(lines())


def test_outputs_without_requests():
    """As with vLLM."""
    with pytest.raises(SettingsError, match="--enable-log-outputs needs --enable-log-requests"):
        Settings(enable_log_outputs=True)


def test_an_endpoint_that_is_none():
    """It would never match."""
    with pytest.raises(SettingsError, match="--disable-access-log-for-endpoints"):
        Settings(disable_access_log_for_endpoints="health")
