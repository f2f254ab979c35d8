"""What clients read, byte for byte: whole answers and event streams."""

from __future__ import annotations

import asyncio
import json

from tests.helpers.waiting import until
from tests.web.fake_backend import Delta, Served, batch

CACHED = {"cached_tokens": 1, "created_cache_tokens": 0, "multimodal_tokens": None}
USAGE = {
    "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "prompt_tokens_details": CACHED,
    "completion_tokens_details": None,
}  # fmt: skip
NULLS = dict.fromkeys(("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics"))
CHAT_NULLS = {**NULLS, **dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))}
HEADERS = {"X-Request-Id": "req-1"}


async def ask(http, served: Served, path: str, deltas: list[list[Delta]], **body: object):
    """POST, answer with these batches (one at a time, each written before the next), and return the response's text."""

    async def client() -> tuple[int, str, str]:
        async with http.post(served.url + path, json=body, headers=HEADERS) as response:
            return response.status, response.headers["Content-Type"], await response.text()

    asking = asyncio.create_task(client())
    request = (await served.backend.requested())[0]
    for rows in deltas:
        named = [Delta(**{**vars(row), "request_id": request.request_id}) for row in rows]
        await served.backend.send(served.address, batch(named))
        if body.get("stream"):
            await until(lambda rows=named: written(served, rows))
    return (*await asking, request)


def written(served: Served, rows: list[Delta]) -> bool:
    """Whether these deltas have come in and the handlers have taken them."""
    requests = served.actor.context.inbox.open_requests()
    choices = [choice for request in requests for choice in request.call.choices]
    return not any(choice.changed for choice in choices) and all(
        choice.num_tokens >= row.num_output_tokens for row in rows for choice in choices
    )


def events(text: str, created: int) -> list[str]:
    """The events with the creation time replaced by 0."""
    assert text.endswith("\n\n")
    return [event.replace(f'"created":{created}', '"created":0') for event in text.split("\n\n")[:-1]]


HI = [[Delta("", "Hi", 1)], [Delta("", " you", 2)], [Delta("", "!", 3, finish_reason="stop", stop_reason=7)]]


async def test_chat_stream(serve, http):
    """Role first, then content, then an empty delta with the finish reason, then [DONE]."""
    served = await serve(answers=False)

    status, kind, text, request = await ask(
        http, served, "/v1/chat/completions", HI,
        model="fake-model", messages=[{"role": "user", "content": "hi"}], stream=True,
    )  # fmt: skip

    head = '{"id":"chatcmpl-req-1","object":"chat.completion.chunk","created":0,"model":"fake-model","choices":'
    first = ',"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}'
    tail = ',"token_ids":null}],"kv_transfer_params":null}'
    goes_on = f',"logprobs":null,"finish_reason":null{tail}'
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    assert events(text, int(request.arrived_s)) == [
        f'data: {head}[{{"index":0,"delta":{{"role":"assistant","content":""}}{first}',
        f'data: {head}[{{"index":0,"delta":{{"content":"Hi"}}{goes_on}',
        f'data: {head}[{{"index":0,"delta":{{"content":" you"}}{goes_on}',
        f'data: {head}[{{"index":0,"delta":{{"content":"!"}}{goes_on}',
        f'data: {head}[{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop","stop_reason":7{tail}',
        "data: [DONE]",
    ]


async def test_completion_stream_with_usage(serve, http):
    """With include_usage every chunk has a null usage, and a last one without choices has the numbers."""
    served = await serve(answers=False)

    _, _, text, request = await ask(
        http, served, "/v1/completions", HI,
        model="alias", prompt="hi", stream=True, stream_options={"include_usage": True},
    )  # fmt: skip

    head = '{"id":"cmpl-req-1","object":"text_completion","created":0,"model":"alias","choices":'
    usage = json.dumps(USAGE, separators=(",", ":"))
    goes_on, tail = (
        '"logprobs":null,"finish_reason":null,"stop_reason":null',
        ',"prompt_token_ids":null,"token_ids":null}]',
    )
    end = f'{tail},"kv_transfer_params":null,"usage":null}}'
    assert events(text, int(request.arrived_s)) == [
        f'data: {head}[{{"index":0,"text":"Hi",{goes_on}{end}',
        f'data: {head}[{{"index":0,"text":" you",{goes_on}{end}',
        f'data: {head}[{{"index":0,"text":"!","logprobs":null,"finish_reason":"stop","stop_reason":7{end}',
        f'data: {head}[],"usage":{usage}}}',
        "data: [DONE]",
    ]


async def test_continuous_usage(serve, http):
    """continuous_usage_stats puts the counts so far into every chunk, also into those without text; it begins at 0."""
    served = await serve(answers=False)
    deltas = [[Delta("", "", 1)], [Delta("", "Hi", 2, finish_reason="length")]]

    _, _, text, _ = await ask(
        http, served, "/v1/chat/completions", deltas, messages=[{"role": "user", "content": "hi"}], stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip

    chunks = [json.loads(event[6:]) for event in text.split("\n\n")[:-2]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2, 2]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""}, {"content": ""}, {"content": "Hi"}, {}
    ]  # fmt: skip


async def test_text_is_escaped(serve, http):
    """Line breaks, quotes and any script survive: they cannot break an event apart."""
    served = await serve(answers=False)
    wild = 'a\n\ndata: x\r\u2028"\\ é 漢 😀 </script>'

    _, _, text, _ = await ask(
        http, served, "/v1/completions", [[Delta("", wild, 1, finish_reason="stop")]], prompt="x", stream=True
    )

    chunks = text.split("\n\n")
    assert len(chunks) == 3
    assert json.loads(chunks[0][6:])["choices"][0]["text"] == wild


async def test_whole_chat(serve, http):
    """The answer to a chat that is not streamed."""
    served = await serve(answers=False)

    status, kind, text, request = await ask(
        http, served, "/v1/chat/completions", HI, messages=[{"role": "user", "content": "hi"}]
    )

    assert (status, kind) == (200, "application/json")
    assert json.loads(text) == {
        "id": "chatcmpl-req-1",
        "object": "chat.completion",
        "created": int(request.arrived_s),
        "model": "fake-model",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hi you!",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 7,
                "token_ids": None,
            }
        ],
        "usage": USAGE,
        **CHAT_NULLS,
    }


async def test_whole_completion(serve, http):
    """The answer to a completion that is not streamed."""
    served = await serve(answers=False)

    _, _, text, request = await ask(http, served, "/v1/completions", HI, prompt="hi")

    assert json.loads(text) == {
        "id": "cmpl-req-1",
        "object": "text_completion",
        "created": int(request.arrived_s),
        "model": "fake-model",
        "choices": [
            {
                "index": 0,
                "text": "Hi you!",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 7,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "usage": USAGE,
        **NULLS,
    }


async def test_many_prompts_and_choices(serve, http):
    """Choices come prompt by prompt, n each; usage counts every prompt once and every choice's tokens."""
    served = await serve()

    body = {"prompt": ["one", "two words"], "n": 2, "max_tokens": 50}
    async with http.post(served.url + "/v1/completions", json=body) as response:
        answer = await response.json()

    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "Hello there, dear friend."),
        (1, "Hello there, dear friend 1."),
        (2, "Hello there, dear friend."),
        (3, "Hello there, dear friend 1."),
    ]
    assert [request.prompt for request in served.backend.requests] == ["one", "two words"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 2 * (6 + 7)


async def test_many_prompts_streamed(serve, http):
    """Every choice of a stream has its own role, text and end."""
    served = await serve()

    body = {"prompt": [[1, 2], [3]], "n": 2, "stream": True}
    async with http.post(served.url + "/v1/completions", json=body) as answer:
        text = await answer.text()

    texts, ends = {}, []
    for event in text.split("\n\n")[:-2]:
        (choice,) = json.loads(event[6:])["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {i: "Hello there, dear friend" + (" 1." if i % 2 else ".") for i in range(4)}
    assert sorted(ends) == [0, 1, 2, 3]


async def test_duplicates_are_dropped(serve, http):
    """A delta that was counted already, or that comes after the end, changes nothing."""
    served = await serve(answers=False)
    deltas = [
        [Delta("", "a", 1)],
        [Delta("", "a", 1), Delta("", "b", 2)],
        [Delta("", "b", 2), Delta("", "c", 3, finish_reason="stop"), Delta("", "c", 3, finish_reason="stop")],
    ]

    _, _, text, _ = await ask(http, served, "/v1/completions", deltas, prompt="x")

    assert json.loads(text)["choices"][0]["text"] == "abc"


async def test_request_ids(serve, http):
    """A sane X-Request-Id is taken and echoed; any other is replaced; the bus never sees the same id twice."""
    served = await serve()

    async def ask_with(given: str) -> tuple[str, str]:
        headers = {"X-Request-Id": given} if given else {}
        async with http.post(served.url + "/v1/completions", json={"prompt": "x"}, headers=headers) as response:
            return response.headers["X-Request-Id"], (await response.json())["id"]

    assert await ask_with("mine-1") == ("mine-1", "cmpl-mine-1")
    assert await ask_with("mine-1") == ("mine-1", "cmpl-mine-1")
    for bad in ("", "a b", "x" * 129, "é"):
        echoed, answer_id = await ask_with(bad)
        assert echoed != bad
        assert answer_id == f"cmpl-{echoed}"
    assert len({request.request_id for request in served.backend.requests}) == 6
