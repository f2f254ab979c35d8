"""``/invocations``: the body says which endpoint answers."""

from __future__ import annotations

import pytest

from tests.web.fake_backend import SENTENCE

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


async def invoke(http, served, body, **headers):
    async with http.post(served.url + "/invocations", json=body, headers=headers) as response:
        return (
            response.status,
            response.content_type,
            await (response.json() if response.content_type == "application/json" else response.text()),
        )


@pytest.mark.parametrize(
    ("body", "kind"),
    [(CHAT, "chat.completion"), ({"prompt": "Hi"}, "text_completion"), ({"input": ["a", "b"]}, "list")],
)
async def test_the_body_decides(serve, http, body, kind):
    """As the endpoint's own route answers, but for ids and times."""
    served = await serve()
    status, _, told = await invoke(http, served, body)
    path = {"list": "embeddings", "text_completion": "completions"}.get(kind, "chat/completions")
    async with http.post(f"{served.url}/v1/{path}", json=body) as response:
        theirs = await response.json()

    assert (status, told["object"]) == (200, kind)
    assert {**told, "id": 0, "created": 0} == {**theirs, "id": 0, "created": 0}


async def test_streams(serve, http):
    """As server-sent events."""
    served = await serve()
    _, kind, told = await invoke(http, served, {**CHAT, "stream": True})
    assert (kind, told.endswith("data: [DONE]\n\n")) == ("text/event-stream", True)
    assert all(word in told for word in SENTENCE[:3])


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "messages"), ({"prompt": None, "text": "x"}, "messages"), ({**CHAT, "prompt": "x"}, "prompt")],
)
async def test_what_is_nobodys(serve, http, body, param):
    """A body of no endpoint, or of two, is a 400 that names a field."""
    served = await serve()
    status, _, told = await invoke(http, served, body)
    assert (status, told["error"]["param"]) == (400, param)


async def test_limits(serve, http):
    """The key is asked for, and the limits of the endpoint hold."""
    served = await serve(api_key=("k",), max_num_queued_tokens=100)
    assert (await invoke(http, served, CHAT))[0] == 401
    status, _, told = await invoke(http, served, {**CHAT, "max_tokens": 300}, Authorization="Bearer k")
    assert (status, told["error"]["reason"]) == (400, "too_many_tokens")


async def test_sessions(serve, http, tmp_path):
    """Opened, named in requests, and closed, by the key that has opened it; the header of who opens one is not read."""
    (file := tmp_path / "keys.toml").write_text('[a]\nkey = "key-of-a"\n[b]\nkey = "key-of-b"\n')
    served = await serve(sagemaker_session_s=60.0, api_key_file=str(file))
    name = "X-Amzn-SageMaker-Session-Id"

    async def post(body, key="a", **headers):
        headers["Authorization"] = f"Bearer key-of-{key}"
        async with http.post(served.url + "/invocations", json=body, headers=headers) as response:
            return response.status, response.headers, await response.text()

    status, headers, _ = await post({"requestType": "NEW_SESSION"}, **{name: "whatever"})
    session, _, rest = headers["X-Amzn-SageMaker-New-Session-Id"].partition("; Expires=")
    assert (status, rest.endswith("Z")) == (200, True)
    assert (await post(CHAT, **{name: session}))[0] == 200
    for body in (CHAT, {"requestType": "CLOSE"}):
        assert (await post(body, "b", **{name: session}))[0] == 400
        assert (await post(body, **{name: "another"}))[0] == 400
    status, headers, _ = await post({"requestType": "CLOSE"}, **{name: session})
    assert (status, headers["X-Amzn-SageMaker-Closed-Session-Id"]) == (200, session)
    assert "session_not_found" in (await post(CHAT, **{name: session}))[2]
    assert "requestType" in (await post({"requestType": "NAP"}))[2]
    assert "messages" in (await post({"requestType": "NEW_SESSION", "messages": []}))[2]


async def test_no_sessions(serve, http):
    """Unless the server was told so: then who asks for them is told."""
    served = await serve()
    for body, headers in (({"requestType": "NEW_SESSION"}, {}), (CHAT, {"X-Amzn-SageMaker-Session-Id": "s"})):
        status, _, told = await invoke(http, served, body, **headers)
        assert (status, told["error"]["reason"]) == (400, "not_enabled")
