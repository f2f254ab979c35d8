"""The exact shapes of answers that tell log probabilities, token ids and prompts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from pagebus.web.calls import answer_details
from pagebus.web.calls.answer_details import AnswerDetails, Token, TokenTexts, completion_logprobs, text_length
from tests.web.fake_backend import MODEL, Delta, batch

HEAD = ("id", "object", "created", "model")
MESSAGE_NULLS = dict.fromkeys(("annotations", "audio", "function_call", "reasoning"))
T0 = {"token": "t0", "logprob": -0.25, "bytes": [0xE4, 0xBD]}


async def ask(served, http, path="completions", **body):
    async with http.post(f"{served.url}/v1/{path}", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return {name: value for name, value in answer.items() if name not in HEAD}


async def events(served, http, path="completions", **body):
    async with http.post(f"{served.url}/v1/{path}", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [{name: value for name, value in json.loads(line).items() if name not in HEAD} for line in lines]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_prompt_are_made_once(serve, http, monkeypatch, stream):
    """Each choice repeats them; made for each, those of a long prompt would hold up the loop for seconds."""
    made = []

    def count(tokens, *more):
        made.append(len(tokens))
        return completion_logprobs(tokens, *more)

    monkeypatch.setattr(answer_details, "completion_logprobs", count)
    served = await serve()
    body = {"prompt": "a b c", "max_tokens": 2, "logprobs": 2, "echo": True}

    async def told(n):
        if not stream:
            return [choice["logprobs"] for choice in (await ask(served, http, **body, n=n))["choices"]]
        chunks = [choice for chunk in await events(served, http, **body, n=n) for choice in chunk["choices"]]
        return [[each["logprobs"] for each in chunks if each["index"] == index] for index in range(n)]

    alone = await told(1)
    made.clear()
    assert await told(3) == alone * 3
    assert made.count(3) == 1


async def test_completion_logprobs(serve, http):
    """The token comes first, then the alternatives, so that there is one more than asked for."""
    served = await serve()

    answer = await ask(served, http, prompt="a b", max_tokens=2, logprobs=2)

    assert answer["choices"] == [{
        "index": 0,
        "text": "Hello there",
        "logprobs": {
            "text_offset": [0, 5],
            "token_logprobs": [-1.0, -1.25],
            "tokens": ["Hello", " there"],
            "top_logprobs": [{"Hello": -1.0, "t0": -0.25, "t1": -0.5}, {" there": -1.25, "t0": -0.25, "t1": -0.5}],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }]  # fmt: skip


@pytest.mark.parametrize("first", [1, 3, 6])
def test_text_offsets_of_split_characters(first):
    """They count characters of the text: all parts of a character are where it is, in one chunk or in two."""
    names = TokenTexts()
    names.add({1: "a", 2: "\ufffd", 3: "\ufffd", 4: "\ufffd", 5: "b"}, {2: "f0", 3: "9f98", 4: "80"})
    tokens, details = [Token(token_id, -1.0) for token_id in (1, 2, 3, 4, 5, 5)], AnswerDetails(logprobs=0)

    begun = completion_logprobs(tokens[:first], names, details, 0)["text_offset"]
    rest = completion_logprobs(tokens[first:], names, details, text_length(tokens[:first], names))["text_offset"]

    assert begun + rest == [0, 1, 1, 1, 2, 3]


async def test_echo(serve, http):
    """The prompt, as it was written, and its tokens come first; the first has no log probability."""
    served = await serve()

    answer = await ask(served, http, prompt="a  b", max_tokens=1, logprobs=1, echo=True)
    alone = await ask(served, http, prompt=[5, 6], max_tokens=0, logprobs=0, echo=True)

    (choice,) = answer["choices"]
    assert choice["text"] == "a  bHello"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -3.0, -1.0],
        "tokens": ["a", "b", "Hello"],
        "top_logprobs": [None, {"b": -3.0, "t0": -0.25}, {"Hello": -1.0, "t0": -0.25}],
    }
    (choice,) = alone["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("<0> <1>", "length")
    assert choice["logprobs"]["tokens"] == ["<0>", "<1>"]
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["usage"]["total_tokens"] == 2


async def test_prompt_logprobs_and_token_ids(serve, http):
    """In each choice of a completion, beside the choices of a chat."""
    served = await serve()
    options = {"max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}

    completion = await ask(served, http, prompt="a b", **options)
    chat = await ask(served, http, "chat/completions", messages=[{"role": "user", "content": "b"}], **options)

    entries = {"2": {"logprob": -3.0, "rank": 7, "decoded_token": "b"},
               "21": {"logprob": -0.25, "rank": 1, "decoded_token": "t0"}}  # fmt: skip
    (choice,) = completion["choices"]
    assert choice["prompt_logprobs"] == [None, entries]
    assert (choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]) == ([1, 2], [10, 11], None)
    entries["2"]["decoded_token"] = "<1>"
    assert chat["prompt_logprobs"] == [None, entries]
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == ([1, 2], [10, 11])


async def test_chat_logprobs(serve, http):
    """Bytes are the token's own, also where the token alone is no text."""
    served = await serve()
    question = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}

    answer = await ask(served, http, "chat/completions", **question, top_logprobs=1)
    plain = await ask(served, http, "chat/completions", **question, return_tokens_as_token_ids=True)

    entry = {"token": "Hello", "logprob": -1.0, "bytes": list(b"Hello")}
    assert answer["choices"] == [{
        "index": 0,
        "message": {"role": "assistant", "content": "Hello", "refusal": None, **MESSAGE_NULLS},
        "logprobs": {"content": [{**entry, "top_logprobs": [T0]}], "refusal": None},
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
    }]  # fmt: skip
    assert plain["choices"][0]["logprobs"]["content"] == [{**entry, "token": "token_id:10", "top_logprobs": []}]


async def test_completion_stream(serve, http):
    """What a chunk's tokens say goes with the chunk; the prompt goes with the first; offsets run on."""
    served = await serve()

    chunks = await events(served, http, prompt="a b", max_tokens=2, logprobs=0, echo=True, return_token_ids=True,
                          stream_options={"include_usage": True})  # fmt: skip

    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert "".join(part["text"] for part in parts) == "a bHello there"
    assert parts[0]["prompt_token_ids"] == [1, 2]
    assert all(part["prompt_token_ids"] is None for part in parts[1:])
    assert [token for part in parts for token in part["token_ids"]] == [10, 11]
    assert [offset for part in parts for offset in part["logprobs"]["text_offset"]] == [0, 1, 2, 7]
    assert [tops for part in parts for tops in part["logprobs"]["top_logprobs"]][-1] == {" there": -1.25}
    assert [part["finish_reason"] for part in parts][-1] == "length"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 2


async def test_chat_stream(serve, http):
    """Role and prompt first, then content with its tokens, then the end."""
    served = await serve()
    chunks = await events(
        served, http, "chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=2, logprobs=True,
        return_token_ids=True,
    )  # fmt: skip

    first, *middle, last = chunks
    assert first == {
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
        "prompt_token_ids": [1, 2],
        "prompt_text": None,
    }
    parts = [chunk["choices"][0] for chunk in middle]
    assert "".join(part["delta"]["content"] for part in parts) == "Hello there"
    assert [entry["token"] for part in parts for entry in part["logprobs"]["content"]] == ["Hello", " there"]
    assert [token for part in parts for token in part["token_ids"]] == [10, 11]
    assert last["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None, "token_ids": []}
    ]


async def test_best_of(serve, http):
    """Ties keep their order, and all tokens are paid for; what the fake says is equally likely is cut to n."""
    served = await serve()

    answer = await ask(served, http, prompt="a", max_tokens=2, n=2, best_of=3)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 6
    assert (await served.backend.requested())[0].sampling.n == 3


async def test_an_end_before_the_prompt_is_an_error(serve, http):
    """No answer without what was asked for, and no waiting for ever."""
    served = await serve(answers=False)
    call = asyncio.create_task(http.post(f"{served.url}/v1/completions", json={"prompt": "a", "echo": True}))
    (request,) = await served.backend.requested()
    await served.backend.send(served.address, batch([Delta(request.request_id, "x", 1, finish_reason="stop")]))

    async with await call as response:
        assert response.status == 500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"), ({"best_of": 3, "stream": True}, "best_of"), ({"best_of": 65}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"), ({"echo": 1}, "echo"), ({"return_token_ids": 1}, "return_token_ids"),
        ({"bad_words": ["a"] * 129}, "bad_words"), ({"bad_words": [" "]}, "bad_words[0]"),
        ({"bad_words": "a"}, "bad_words"), ({"bad_words": [1]}, "bad_words[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [1000]}, "allowed_token_ids[0]"),
    ],
)  # fmt: skip
async def test_refusals(serve, http, body, param):
    """Out of range, of a wrong type, or not to be had together."""
    served = await serve()

    async with http.post(f"{served.url}/v1/completions", json={"prompt": "a", **body}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_chat_refusals(serve, http):
    """top_logprobs needs logprobs, which is a boolean here."""
    served = await serve()
    for body, param in (({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": 2}, "logprobs")):
        question = {"messages": [{"role": "user", "content": "x"}], **body}
        async with http.post(f"{served.url}/v1/chat/completions", json=question) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param


async def test_chosen_log_probabilities(serve, http):
    """With ``logprob_token_ids`` the token itself comes first, then those that were named, however many likely ones
    were asked for."""
    served = await serve()
    named = {"logprob_token_ids": [21, 10, 22], "max_tokens": 1}

    completion = await ask(served, http, prompt="a", logprobs=0, **named)
    chat = await ask(
        served, http, "chat/completions", messages=[{"role": "user", "content": "x"}], logprobs=True, **named
    )

    assert served.backend.requests[0].sampling.logprob_token_ids == (21, 10, 22)
    assert completion["choices"][0]["logprobs"]["top_logprobs"] == [{"Hello": -1.0, "t0": -0.25, "t1": -0.5}]
    (told,) = chat["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"]) for each in told["top_logprobs"]] == [
        ("Hello", -1.0), ("t0", -0.25), ("t1", -0.5)
    ]  # fmt: skip


async def test_refused_log_probabilities(serve, http):
    """Both routes say what is wrong with the numbers."""
    served = await serve()
    prompt, question = {"prompt": "a"}, {"messages": [{"role": "user", "content": "x"}]}
    for path, body, field, words in (
        ("completions", prompt, {"logprobs": -1}, "--max-logprobs"),
        ("completions", prompt, {"logprobs": 21}, "at most 20"),
        ("completions", prompt, {"prompt_logprobs": -1}, "--max-logprobs"),
        ("completions", prompt, {"logprob_token_ids": [5]}, "needs logprobs"),
        ("completions", prompt, {"logprob_token_ids": [1000], "logprobs": 1}, "outside the vocabulary"),
        ("completions", prompt, {"logprob_token_ids": [1] * 129, "logprobs": 1}, "at most 128"),
        ("chat/completions", question, {"prompt_logprobs": -1}, "--max-logprobs"),
        ("chat/completions", question, {"top_logprobs": -1, "logprobs": True}, "--max-logprobs"),
        ("chat/completions", question, {"logprob_token_ids": [5]}, "needs logprobs"),
    ):
        async with http.post(f"{served.url}/v1/{path}", json={**body, **field}) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert error["param"].startswith(next(iter(field)))
        assert words in error["message"]


async def test_the_whole_vocabulary(serve, http):
    """Where the server allows it, -1 asks for all of it."""
    served = await serve(model=replace(MODEL, max_logprobs=-1, vocab_size=5))

    await ask(served, http, prompt="a", logprobs=-1, max_tokens=1)
    await ask(
        served, http, "chat/completions", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=-1
    )

    assert [request.sampling.logprobs for request in served.backend.requests] == [5, 5]


async def test_the_prompt_of_a_chat(serve, http):
    """``return_prompt_text`` tells it beside the choices, and in a stream's first chunk alone."""
    served = await serve()
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "return_prompt_text": True}

    whole = await ask(served, http, "chat/completions", **body)
    first, *others = await events(served, http, "chat/completions", **body)

    assert (whole["prompt_text"], first["prompt_text"]) == ("<0> <1>", "<0> <1>")
    assert (whole["prompt_token_ids"], first["prompt_token_ids"]) == (None, None)
    assert all("prompt_text" not in each for each in others)


async def test_chat_echo(serve, http):
    """An assistant's message that is continued is told whole, streamed or not; a user's is not."""
    served = await serve()
    started = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    options = {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 2, "echo": True}
    url = f"{served.url}/v1/chat/completions"
    async with http.post(url, json={"messages": started, **options}) as response:
        (choice,) = (await response.json())["choices"]
    async with http.post(url, json={"messages": started, "stream": True, **options}) as response:
        chunks = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: {")]
    async with http.post(url, json={"messages": started[:1], "max_tokens": 2, "echo": True}) as response:
        (other,) = (await response.json())["choices"]

    assert choice["message"]["content"] == "Well," + other["message"]["content"]
    deltas = [part["delta"].get("content", "") for chunk in chunks for part in chunk["choices"]]
    assert "".join(deltas) == choice["message"]["content"]
