"""JSON at the edges of what parsers take: each is a 400 that names the field, or is read in the one way we promise."""

from __future__ import annotations

import json
import re

import pytest


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ('{"prompt": "x", "metadata": {"a": @300}}', "invalid_value", "metadata"),
        ('{"prompt": "x", "user": @300}', "invalid_value", "user"),
        ('{"prompt": "x", "response_format": @300}', "invalid_value", "response_format"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f", '
            '"parameters": {"a": @62}}}]}',
            "invalid_value",
            "tools",
        ),
        ('{"prompt": "x", "unheard_of": @300}', "invalid_value", "unheard_of"),
        ('{"prompt": @300}', "invalid_value", "prompt"),
        ('{"prompt": @9}', "invalid_type", "prompt[0][0]"),
        ('{"prompt": "x", "metadata": @1025}', "invalid_json", None),
        ('{"prompt": "x", "temperature": NaN}', "invalid_json", None),
        ('{"prompt": "x", "temperature": 1e999}', "invalid_json", None),
        ('{"prompt": "x", "temperature": 1e308}', "invalid_value", "temperature"),
        ('{"prompt": "x", "seed": 18446744073709551616}', "invalid_type", "seed"),
        ('{"prompt": "x", "n": 18446744073709551615}', "invalid_value", "n"),
        ('{"prompt": [18446744073709551615]}', "invalid_value", "prompt[0]"),
        ('{"prompt": "\\ud800"}', "invalid_json", None),
        ('{"prompt": "x", "n": 1, "n": 0}', "invalid_value", "n"),
    ],
)
async def test_refused(serve, http, body, code, param):
    """Nothing of it reaches the bus."""
    served = await serve()
    body = re.sub("@([0-9]+)", lambda depth: nested(int(depth[1])), body)

    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with http.post(served.url + path, data=body) as response:
        error = json.loads(await response.read())["error"]

    assert (response.status, error["reason"], error["param"]) == (400, code, param)
    assert served.backend.requests == []


DEPTHS = (64, 65, 300, 1020, 2000)


def arguments_of(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


async def test_json_within_json(serve, http):
    """Arguments of calls come as text, and are as deep as others may be: deeper ones, which could not be sent on, are
    shown as none."""
    served = await serve()
    for depth in DEPTHS:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments_of(depth)}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        async with http.post(served.url + "/v1/chat/completions", json={"messages": messages}) as response:
            assert response.status == 200
    given = [request.messages[0]["tool_calls"][0]["function"]["arguments"] for request in served.backend.requests]
    assert given == [json.loads(arguments_of(64)), {}, {}, {}, {}]


async def test_json_within_json_of_an_answer(serve, http):
    """What a client of responses sends back is left out if it could not be sent on, as behind the response itself."""
    served = await serve()
    for depth in DEPTHS:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments_of(depth)}
        turn = {"role": "user", "content": "x"}
        async with http.post(served.url + "/v1/responses", json={"input": [turn, call, turn]}) as response:
            assert response.status == 200
    calls = [sum(len(each.get("tool_calls", ())) for each in request.messages) for request in served.backend.requests]
    assert calls == [1, 0, 0, 0, 0]


async def test_what_cannot_be_sent_costs_its_request_alone(serve, http, monkeypatch):
    """Should a value get in that no message can hold, the ingress lives on."""
    served = await serve()
    monkeypatch.setattr("pagebus.web.requests.chat_messages.check_depth", lambda value, _: value.update(a=object()))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    bodies = ({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]},
              {"messages": [{"role": "user", "content": "x"}]})  # fmt: skip
    for body, status in zip(bodies, (500, 200), strict=True):
        async with http.post(served.url + "/v1/chat/completions", json=body) as response:
            assert response.status == status
    assert served.actor.state == "ready"


async def test_the_last_of_two_values_counts(serve, http):
    """As in Python's and most other parsers; a proxy that checks bodies has to read them the same way."""
    served = await serve()

    async with http.post(served.url + "/v1/completions", data='{"prompt": "first", "prompt": "last"}') as response:
        assert response.status == 200

    assert [request.prompt for request in served.backend.requests] == ["last"]
