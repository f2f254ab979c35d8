"""Settings of the HTTP side that vLLM's users know: where it listens, and how streams and answers look."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import socket
from dataclasses import replace

import aiohttp
import pytest

from pagebus.actors.runtime.health_check import http_status
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.messages import RequestFailed
from pagebus.web.server.listener import OPEN_FILES, is_listened_to, listen_on_path
from tests.helpers.waiting import until
from tests.web.fake_backend import MODEL, Delta, batch

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


async def events_of(http, url, body):
    """The events of a stream, comments too, without the last."""
    async with http.post(url, json={**body, "stream": True}) as response:
        text = await response.text()
    events = text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(each.removeprefix("data: ")) if each.startswith("data: ") else each for each in events[:-1]]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)])
async def test_usage_that_nobody_asked_for(serve, http, path, body):
    """Ends every stream of a server that was told so, also where a client says that it does without."""
    served = await serve(model=replace(MODEL, forces_usage=True))
    plain = await serve()
    for options in ({}, {"stream_options": {"include_usage": False}}):
        last = (await events_of(http, served.url + path, {**body, **options}))[-1]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
        assert (await events_of(http, plain.url + path, {**body, **options}))[-1]["choices"]


async def test_stream_interval(serve, http):
    """An event holds so many tokens of a choice at least, but for the first and the last."""
    served = await serve(stream_interval=3)
    plain = await serve()
    whole = await events_of(http, plain.url + "/v1/completions", {"prompt": "x"})
    events = await events_of(http, served.url + "/v1/completions", {"prompt": "x", "return_token_ids": True, "n": 2})
    for index in (0, 1):
        told = [each["choices"][0] for each in events if each["choices"][0]["index"] == index]
        counts = [len(each["token_ids"]) for each in told]
        assert all(count >= 3 for count in counts[1:-1])
    texts = ["".join(each["choices"][0]["text"] for each in seen if each["choices"][0]["index"] == 0)
             for seen in (whole, events)]  # fmt: skip
    assert texts[0] == texts[1]


@pytest.mark.parametrize("background", [False, True])
async def test_stream_interval_of_a_response(serve, http, background):
    """Its deltas have as many tokens."""
    served = await serve(answers=False, stream_interval=2)
    body = {"input": "x", "stream": True, "background": background}
    asking = asyncio.create_task(http.post(served.url + "/v1/responses", json=body))
    (request,) = await served.backend.requested()
    (opened,) = served.actor.context.inbox.open_requests()

    async def say(count: int, **more: object) -> None:
        delta = Delta(request.request_id, f"<{count}>", count, text_offset=3 * (count - 1), **more)
        await served.backend.send(served.address, batch([delta]))
        await until(lambda: opened.choices[0].num_tokens == count)

    await say(1)
    await say(2)
    await say(3)
    await say(4, finish_reason="stop")
    async with await asking as response:
        told = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
    assert deltas == ["<1>", "<2><3>", "<4>"]


async def test_a_response_tells_what_was_sampled_with(serve, http):
    """What the client leaves out is the model's own default, not that of OpenAI's API."""
    served = await serve(model=replace(MODEL, default_sampling={"temperature": 0.6, "top_p": 0.9}))
    async with http.post(served.url + "/v1/responses", json={"input": "x", "top_p": 0.5}) as response:
        told = await response.json()
    assert (told["temperature"], told["top_p"]) == (0.6, 0.5)


async def test_stream_interval_in_steps(serve, http):
    """What is held back is told with the next event, or before an error."""
    served = await serve(answers=False, stream_interval=2)
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "x", "stream": True}))
    (request,) = await served.backend.requested()

    async def say(count: int, offset: int, **more: object) -> None:
        delta = Delta(request.request_id, f"<{count}>", count, text_offset=offset, **more)
        await served.backend.send(served.address, batch([delta]))

    await say(1, 0)
    async with await asking as response:
        assert b"<1>" in await response.content.readuntil(b"\n\n")
        await say(2, 3)
        await say(3, 6)
        assert b'"<2><3>"' in await response.content.readuntil(b"\n\n")
        await say(4, 9)
        await say(4, 12, finish_reason="error")
        rest = await response.text()
    assert '"<4>"' in rest
    assert rest.index("<4>") < rest.index("error")


async def test_keep_alive(serve, http):
    """A stream that has nothing to say sends comments, before its first event too."""
    served = await serve(answers=False, sse_keep_alive_interval=1)
    asking = asyncio.create_task(http.post(served.url + "/v1/completions", json={"prompt": "x", "stream": True}))
    (request,) = await served.backend.requested()
    async with await asking as response:
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        last = Delta(request.request_id, "so", 1, text_offset=0, finish_reason="stop")
        await served.backend.send(served.address, batch([last]))
        text = await response.text()
    assert "so" in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("background", [False, True])
async def test_keep_alive_of_a_response(serve, http, background):
    """Its events come another way, and so do their comments."""
    served = await serve(answers=False, sse_keep_alive_interval=1)
    body = {"input": "x", "stream": True, "background": background}
    asking = asyncio.create_task(http.post(served.url + "/v1/responses", json=body))
    (request,) = await served.backend.requested()
    async with await asking as response:
        while await response.content.readuntil(b"\n\n") != b": keep-alive\n\n":
            pass
        await served.backend.send(served.address, batch([Delta(request.request_id, "so", 1, finish_reason="stop")]))
        text = await response.text()
    assert '"delta":"so"' in text
    assert "event: response.completed" in text


async def test_an_error_behind_a_comment(serve, http):
    """The status is told by then, so it is an event."""
    served = await serve(answers=False, sse_keep_alive_interval=1)
    asking = asyncio.create_task(http.post(served.url + "/v1/responses", json={"input": "x", "stream": True}))
    (request,) = await served.backend.requested()
    async with await asking as response:
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        failure = RequestFailed(
            request_id=request.request_id, status=400, error_type="", message="No.", param="messages"
        )
        await served.backend.send(served.address, failure)
        event, data = [line for line in (await response.text()).splitlines() if not line.startswith(":")][-3:-1]
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["param"] == "input"


async def test_leaving_a_silent_response(serve, http):
    """What is computed for it ends."""
    served = await serve(answers=False, sse_keep_alive_interval=1)
    asking = asyncio.create_task(http.post(served.url + "/v1/responses", json={"input": "x", "stream": True}))
    (request,) = await served.backend.requested()
    async with await asking as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    assert await served.backend.aborted() == [request.request_id]


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
async def test_metrics_of_requests(serve, http, more):
    """In answers, and beside the usage of streams; of several choices they are null."""
    served = await serve(enable_per_request_metrics=True)
    body = {"prompt": "x", **more}
    async with http.post(served.url + "/v1/completions", json=body) as response:
        told = (await response.json())["metrics"]
    assert told.pop("queue_time_ms") is None
    assert told.keys() == {"time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"}
    assert all(value >= 0 for value in told.values())
    events = await events_of(http, served.url + "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert events[-1]["metrics"]["tokens_per_second"] > 0
    async with http.post(served.url + "/v1/completions", json=body | {"n": 2}) as response:
        assert set((await response.json())["metrics"].values()) == {None}
    plain = await serve()
    async with http.post(plain.url + "/v1/completions", json=body) as response:
        assert (await response.json())["metrics"] is None


async def test_root_path(serve, http):
    """Routes answer with it and without it; the description names it, and metrics do without."""
    served = await serve(root_path="/llm", api_key=("k",))
    headers = {"Authorization": "Bearer k"}
    for root in ("", "/llm"):
        async with http.post(f"{served.url}{root}/v1/chat/completions", json=CHAT, headers=headers) as response:
            assert response.status == 200
        async with http.post(f"{served.url}{root}/v1/chat/completions", json=CHAT) as response:
            assert response.status == 401
        async with http.get(f"{served.url}{root}/openapi.json", headers=headers) as response:
            assert (await response.json())["servers"] == [{"url": "/llm"}]
        async with http.get(f"{served.url}{root}/health") as response:
            assert response.status == 200
    async with http.get(served.url + "/llm/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith("http_requests_total")]
    assert not any("/llm" in line for line in lines)
    (counted,) = [line for line in lines if 'handler="/v1/chat/completions"' in line and 'status="2xx"' in line]
    assert counted.endswith(" 2.0")


async def test_the_page_below_a_root_path(serve, http):
    """The path itself leads to the page, without a key; its links are relative, those for programs name the path."""
    served = await serve(root_path="/llm", api_key=("k",))
    async with http.get(served.url + "/llm", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (307, "/llm/")
    for root in ("", "/llm"):
        async with http.get(f"{served.url}{root}/", headers={"Accept": "text/html"}) as response:
            assert re.findall(r'(?:href|src)="/', await response.text()) == []
        async with http.get(f"{served.url}{root}/") as response:
            assert (await response.json())["links"]["models"] == "/llm/v1/models"


async def test_a_unix_socket(serve, tmp_path):
    """Is listened on instead of an address; one that was left there goes, one with a listener stays with it."""
    path = str(tmp_path / "ingress.sock")
    with socket.socket(socket.AF_UNIX) as left_there:
        left_there.bind(path)
    served = await serve(uds=path)
    connector = aiohttp.UnixConnector(path)
    address = "http://localhost/v1/chat/completions"
    async with aiohttp.ClientSession(connector=connector) as http, http.post(address, json=CHAT) as response:
        assert response.status == 200
    assert served.actor.port is None
    assert await http_status("unix:" + path, 0, "/health") == 200
    with pytest.raises(SettingsError, match="another process listens there"):
        listen_on_path(path)
    assert await http_status("unix:" + path, 0, "/health") == 200


def test_a_unix_socket_that_accepts_no_more(tmp_path):
    """Its process may be frozen: asking does not wait for it, and the socket stays with it."""
    path = str(tmp_path / "ingress.sock")
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as stack:

        def connects() -> bool:
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            return client.connect_ex(path) == 0

        listening.bind(path)
        listening.listen(0)
        while connects():
            pass
        assert is_listened_to(path)
    assert not is_listened_to(path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"uds": "/tmp/x", "ingresses": 2}, "--uds: one ingress"),
        ({"root_path": "llm"}, "--root-path"),
        ({"root_path": "/llm/"}, "--root-path"),
        ({"stream_interval": 0}, "--stream-interval"),
    ],
)
def test_settings_that_cannot_be(settings, problem):
    with pytest.raises(SettingsError, match=problem):
        Settings(**settings)


def test_a_socket_that_cannot_be_had(tmp_path):
    """Ends the start with the path and the reason; a file that is no socket stays."""
    with pytest.raises(SettingsError, match=r"--uds .*No such file"):
        listen_on_path(str(tmp_path / "nowhere" / "ingress.sock"))
    (file := tmp_path / "file").write_text("x")
    with pytest.raises(SettingsError, match=r"--uds .*in use"):
        listen_on_path(str(file))
    assert file.read_text() == "x"


async def test_tokens_only(serve, http):
    """Routes of texts are not there."""
    served = await serve(tokens_only=True)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/v1/messages"):
        async with http.post(served.url + path, json=CHAT) as response:
            assert response.status == 404
    async with http.get(served.url + "/v1/models") as response:
        assert response.status == 200


async def test_connections_may_be_as_many_as_the_system_permits(serve, lines, monkeypatch):
    """The soft limit of open files, 1024 by default, is raised; a low hard limit is told, as clients are not."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        await serve()
        most = OPEN_FILES if before[1] == resource.RLIM_INFINITY else min(OPEN_FILES, before[1])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    await serve()
    warnings = [(line["event"], line["limit"]) for line in lines() if line["level"] == "warning" and "limit" in line]
    assert warnings == [("few files may be open", 1024)]
