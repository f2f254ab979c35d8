"""Fields that clients of vLLM send, through the whole system."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import pagebus.actors.shipped_model
from tests.system.serving import Client, serving

MODEL = Path(pagebus.actors.shipped_model.__file__).parent
QUESTION = {"messages": [{"role": "user", "content": "What is water?"}]}


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving(MODEL) as client:
        yield client


async def test_repetition_ends_an_output(client: Client) -> None:
    """Of the choices that repeat themselves, at the same token whether it is streamed or not, though more of them are
    computed ahead; others go on."""
    body = {"prompt": "water is", "max_tokens": 40, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    detection = {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}}
    stuck = await client.post("completions", **body, **detection, allowed_token_ids=[50, 51, 52], presence_penalty=2)
    free = await client.post("completions", **body, **detection)

    (choice,) = stuck["choices"]
    ids = choice["token_ids"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert any(ids[-size * 3 :] == ids[-size:] * 3 for size in range(1, 5))
    assert not any(ids[-size * 3 - 1 : -1] == ids[-size - 1 : -1] * 3 for size in range(1, 5) if len(ids) > size * 3)
    assert stuck["usage"]["completion_tokens"] == len(ids) < 40
    assert free["usage"]["completion_tokens"] == 40 or free["choices"][0]["finish_reason"] == "repetition"


async def test_picked_log_probabilities(client: Client) -> None:
    """The same numbers as among the most likely ones, in completions and chats."""
    body = {"prompt": "water is", "max_tokens": 3, "temperature": 0, "return_tokens_as_token_ids": True}
    (likely,) = (await client.post("completions", **body, logprobs=20))["choices"]
    tops = likely["logprobs"]["top_logprobs"]
    wanted = sorted(set.intersection(*(set(each) for each in tops)))[:2] or sorted(tops[0])[3:5]
    picked = [int(name.removeprefix("token_id:")) for name in wanted]

    (told,) = (await client.post("completions", **body, logprobs=0, logprob_token_ids=picked))["choices"]
    chat = await client.post("chat/completions", **QUESTION, max_tokens=1, logprobs=True, logprob_token_ids=picked,
                             return_tokens_as_token_ids=True)  # fmt: skip

    assert told["logprobs"]["tokens"] == likely["logprobs"]["tokens"]
    for place, named in enumerate(told["logprobs"]["top_logprobs"]):
        assert set(named) == {told["logprobs"]["tokens"][place], *wanted}
        for name in wanted:
            if name in tops[place]:
                assert named[name] == pytest.approx(tops[place][name], abs=1e-4)
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in entry["top_logprobs"]][1:] == [name for name in wanted if name != entry["token"]]
    assert entry["top_logprobs"][0]["token"] == entry["token"]


async def test_truncation_side(client: Client) -> None:
    """The first or the last tokens of a prompt count."""
    ids = list(range(30, 60))
    told: dict[str, Any] = {}
    for side in ("left", "right"):
        body = {"prompt": ids, "max_tokens": 1, "truncate_prompt_tokens": 10, "truncation_side": side}
        told[side] = (await client.post("completions", **body, return_token_ids=True))["choices"][0]["prompt_token_ids"]
    assert told == {"left": ids[-10:], "right": ids[:10]}


async def test_the_prompt_of_a_chat_as_text(client: Client) -> None:
    """As the template made it, special tokens and all."""
    told = await client.post("chat/completions", **QUESTION, max_tokens=1, return_prompt_text=True)
    assert told["prompt_text"] == "<|bos|><|user|>What is water?<|end|><|assistant|>"


async def test_no_text(client: Client) -> None:
    """Tokens alone, and as many of them."""
    body = {"prompt": "water is", "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    plain, silent = await client.post("completions", **body), await client.post("completions", **body, detokenize=False)
    assert silent["choices"][0]["text"] == ""
    assert silent["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert silent["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


async def test_reasoning_is_counted() -> None:
    """Of a model that reasons from the beginning and never comes to an end, all tokens."""
    async with serving(MODEL, reasoning_parser="deepseek_r1") as client:
        told = await client.post("chat/completions", **QUESTION, max_tokens=7, ignore_eos=True)
    assert told["choices"][0]["message"]["content"] == ""
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}


async def test_a_conversation_is_embedded(client: Client) -> None:
    """As its rendered text is."""
    chat = await client.post("embeddings", **QUESTION)
    text = "<|bos|><|user|>What is water?<|end|>"
    plain = await client.post("embeddings", input=text, add_special_tokens=False)
    assert chat["usage"] == plain["usage"] | {"prompt_tokens_details": chat["usage"]["prompt_tokens_details"]}
    assert chat["data"][0]["embedding"] == pytest.approx(plain["data"][0]["embedding"], abs=1e-5)


async def test_the_whole_vocabulary() -> None:
    """Where the server allows it: as many log probabilities as tokens, whose probabilities are one together."""
    async with serving(MODEL, max_logprobs=-1) as client:
        body = {"prompt": "water is", "max_tokens": 1, "return_tokens_as_token_ids": True}
        (told,) = (await client.post("completions", **body, logprobs=-1))["choices"]
    (tops,) = told["logprobs"]["top_logprobs"]
    assert len(tops) > 1000
    assert sum(2.718281828459045**value for value in tops.values()) == pytest.approx(1, abs=1e-3)
