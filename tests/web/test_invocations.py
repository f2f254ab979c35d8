"""``/invocations``: the body says which endpoint answers."""

from __future__ import annotations

import pytest
from fake_backend import SENTENCE

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
