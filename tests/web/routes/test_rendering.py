"""``.../render``: what is asked of a tokenizer, and what is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pagebus.web.answers import rendered
from pagebus.web.answers.rendered import sampling_body
from pagebus.web.http.limits import MAX_CHOICES
from pagebus.web.requests.openai import parse_chat
from pagebus.web.requests.token_body import parse_generate
from tests.web.fake_backend import MODEL

COMPLETION, CHAT = "/v1/completions/render", "/v1/chat/completions/render"
MESSAGES = [{"role": "user", "content": "a cat"}]


async def post(http, served, path: str, **body: Any) -> Any:
    async with http.post(served.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_offsets_of_completions(serve, http):
    """Of each prompt, if they are asked for."""
    served = await serve()
    told = await post(http, served, COMPLETION, prompt=["a cat", "sits"], return_token_offsets=True)
    plain = await post(http, served, COMPLETION, prompt="a cat", return_token_offsets=None)

    assert [each["token_offsets"] for each in told] == [[[0, 1], [2, 5]], [[0, 4]]]
    assert [each["token_offsets"] for each in plain] == [None]
    assert [each.return_token_offsets for each in served.backend.requests] == [True, True, False]


@pytest.mark.parametrize("wanted", [True, False])
async def test_offsets_of_a_chat(serve, http, wanted):
    """The same; who tokenizes or generates is told none, as in vLLM."""
    served = await serve()
    told = await post(http, served, CHAT, messages=MESSAGES, return_token_offsets=wanted)
    assert (told["token_offsets"] is not None) is wanted
    for path in ("/tokenize", "/v1/chat/completions"):
        answer = await post(http, served, path, messages=MESSAGES, return_token_offsets=True)
        assert "token_offsets" not in answer
    assert [each.return_token_offsets for each in served.backend.requests] == [wanted, False, False]


@pytest.mark.parametrize("count", [2**31, 2**64 - 1, -1, 1.5])
async def test_counts_of_tokens_that_no_answer_has(serve, http, count):
    """They are refused, and not added up to a number that JSON cannot say."""
    answer = {"choices": [{"token_ids": [5], "finish_reason": "stop"}]}
    body = {"generate_responses": [answer, answer], "prompt_tokens": [count, count]}
    async with http.post((await serve()).url + "/v1/completions/derender", json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "prompt_tokens"


async def test_answers_of_too_many_choices(serve, http):
    """Each of them would be a request to the tokenizers."""
    served = await serve()
    choices = [{"token_ids": [5]}] * (MAX_CHOICES // 2 + 1)
    for path, body, param in (
        ("chat/completions", {"generate_response": {"choices": choices * 2}}, "generate_response.choices"),
        ("completions", {"generate_responses": [{"choices": choices}] * 2}, "generate_responses"),
    ):
        async with http.post(f"{served.url}/v1/{path}/derender", json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param
    assert served.backend.requests == []


async def test_two_of_one_name(serve, http):
    """Clients may send the same `request_id` at the same time, as with the request itself."""
    served = await serve(answers=False)
    asking = [asyncio.create_task(post(http, served, COMPLETION, prompt=text, request_id="r")) for text in "ab"]
    for request in await served.backend.requested(2):
        await served.backend._answer(request)
    assert [told["request_id"] for (told,) in await asyncio.gather(*asking)] == ["cmpl-r", "cmpl-r"]


async def test_what_is_rendered_is_truncated(serve, http):
    """As the request itself would be: -1 leaves room for the output."""
    served = await serve()
    body = {"messages": MESSAGES, "truncate_prompt_tokens": -1, "truncation_side": "right", "max_tokens": 7}
    await post(http, served, CHAT, **body)
    await post(http, served, "/tokenize", messages=MESSAGES, truncate_prompt_tokens=1)

    rendered, tokenized = served.backend.requests
    kept = rendered.truncate_prompt_tokens, rendered.truncation_side, rendered.sampling.max_tokens
    assert kept == (-1, "right", 7)
    assert tokenized.truncate_prompt_tokens is None


def test_a_budget_of_thoughts_is_rendered():
    """Alone, and beside a structured output; where it is computed the prompt's tokens say what is reasoning."""
    model = replace(MODEL, reasoning_parser="qwen3")
    for more in ({}, {"structured_outputs": {"regex": "a"}}):
        asked = parse_chat({"messages": MESSAGES, "thinking_token_budget": 0, **more}, model)
        told = sampling_body(asked.sampling)
        assert (told["thinking_token_budget"], told.get("structured_outputs")) == (0, more.get("structured_outputs"))
        output = parse_generate({"token_ids": [1], "sampling_params": told}, model).sampling.structured_output
        assert (output.thinking_tokens, output.prompt_thought) == (0, -1)


@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_rendered_streams_if_its_request_does(serve, http, stream):
    """A response is computed as a stream, but is rendered as what its client wants."""
    served = await serve()
    for path, body in ((CHAT, {"messages": MESSAGES}), ("/v1/responses/render", {"input": "a cat"})):
        told = await post(http, served, path, stream=stream, **body)
        assert (told["stream"], told["stream_options"] is not None) == (stream, stream)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"use_beam_search": True, "n": 2}, "use_beam_search"),
        (CHAT, {"repetition_detection": {"max_pattern_size": 3, "min_count": 3}}, "repetition_detection"),
        (CHAT, {"logprobs": True, "logprob_token_ids": [4]}, "logprobs"),
        (COMPLETION, {"best_of": 3}, "best_of"),
        (COMPLETION, {"prompt": ["a"] * 1024, "structured_outputs": {"regex": "a" * 100_000}}, "prompt"),
    ],
)
async def test_what_cannot_be_rendered(serve, http, path, fields, param):
    """Who generates from it would do something else; and parameters stand beside each prompt, so they may get long."""
    served = await serve()
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    async with http.post(served.url + path, json=prompt | fields) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param
    assert served.backend.requests == []


async def test_parameters_of_many_prompts(serve, http, monkeypatch):
    """They are written once: a schema takes thousands of times its length in memory, and the loop's time."""
    served = await serve()
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1000)}}
    calls = []
    monkeypatch.setattr(rendered, "sampling_body", lambda sampling: calls.append(1) or sampling_body(sampling))
    told = await post(http, served, COMPLETION, prompt=["a"] * 200, structured_outputs={"json": schema})

    assert [each["sampling_params"]["structured_outputs"] for each in told] == [{"json": schema}] * 200
    assert calls == [1]


def test_a_long_list_of_allowed_tokens_is_rendered():
    """It is sent as bits, but told as ids."""
    model, ids = replace(MODEL, vocab_size=5000), list(range(0, 4000, 2))
    asked = parse_chat({"messages": MESSAGES, "allowed_token_ids": ids}, model)
    told = sampling_body(asked.sampling)

    assert told["allowed_token_ids"] == ids
    again = parse_generate({"token_ids": [1], "sampling_params": told}, model)
    assert again.sampling.allowed_tokens == asked.sampling.allowed_tokens
