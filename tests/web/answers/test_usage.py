"""What is counted: reasoning, what the cache had and gets, in all shapes of answers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from pagebus.actors.settings.vllm_flags import ANY, FLAGS
from tests.web.fake_backend import CACHED_TOKENS, MODEL, Delta, batch

REASONING = replace(MODEL, reasoning_parser="qwen3")
QUESTION = {"messages": [{"role": "user", "content": "x"}]}
PIECES = ["<think>", "\n", "h", "m", "</think>", "\n", "Yes", "."]
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def told(request, pieces, *, first=0, offset=0, finish=None):
    """Some tokens at once, each with its text."""
    lengths = np.array([len(piece) for piece in pieces], np.int32)
    delta = Delta(request.request_id, "".join(pieces), first + len(pieces), finish_reason=finish, text_offset=offset)
    return structs.replace(batch([delta]), length_counts=np.array([len(pieces)], np.int32), text_lengths=lengths)


async def answer(serve, http, path, cuts, **body):
    """The answer to a model that thinks, whose tokens come in batches of these sizes."""
    served = await serve(answers=False, model=REASONING)
    asking = asyncio.create_task(http.post(f"{served.url}/v1/{path}", json={**QUESTION, **body}))
    (request,) = await served.backend.requested()
    assert request.sampling.return_text_lengths
    begin = 0
    for end in cuts:
        pieces, offset = PIECES[begin:end], len("".join(PIECES[:begin]))
        finish = "stop" if end == len(PIECES) else None
        await served.backend.send(served.address, told(request, pieces, first=begin, offset=offset, finish=finish))
        begin = end
    async with await asking as response:
        return await response.text()


@pytest.mark.parametrize("cuts", [[8], [1, 2, 3, 4, 5, 6, 7, 8], [3, 6, 8]])
async def test_reasoning_tokens_of_a_chat(serve, http, cuts):
    """Those between the marks, however tokens come together; the marks themselves do not count."""
    whole = json.loads(await answer(serve, http, "chat/completions", cuts))
    text = await answer(serve, http, "chat/completions", cuts, **STREAM)

    assert whole["choices"][0]["message"]["reasoning"] == "\nhm"
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert (counts[0], counts[-1], counts) == (0, 3, sorted(counts))


@pytest.mark.parametrize(
    ("path", "body"),
    [("completions", {"prompt": "a b"}), ("chat/completions", QUESTION), ("embeddings", {"input": "a b"})],
)
async def test_cached_tokens_are_always_told(serve, http, path, body):
    """As by OpenAI; vLLM's flag for it is taken."""
    served = await serve()
    async with http.post(f"{served.url}/v1/{path}", json=body) as response:
        details = (await response.json())["usage"]["prompt_tokens_details"]

    assert (details["cached_tokens"], details["multimodal_tokens"]) == (CACHED_TOKENS, None)
    assert FLAGS["--enable-prompt-tokens-details"].taken == ANY


async def test_reasoning_tokens_of_a_response(serve, http):
    """In the place that its usage has for them; they count where they are not shown, too."""
    shown = json.loads(await answer(serve, http, "responses", [4, 8], input="x", messages=None))
    hidden = json.loads(await answer(serve, http, "chat/completions", [4, 8], include_reasoning=False))

    assert shown["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert hidden["choices"][0]["message"]["reasoning"] is None
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_what_is_told_again_is_counted_once(serve, http):
    """As to a request that was asked for anew."""
    served = await serve(answers=False, model=REASONING)
    asking = asyncio.create_task(http.post(f"{served.url}/v1/chat/completions", json=QUESTION))
    (request,) = await served.backend.requested()

    await served.backend.send(served.address, told(request, PIECES[:3]))
    await served.backend.send(served.address, told(request, PIECES, finish="stop"))

    async with await asking as response:
        usage = (await response.json())["usage"]
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (8, {"reasoning_tokens": 3})


async def test_nobody_looks_for_reasoning(serve, http):
    """Without a parser for it: null, and nothing is asked of the system."""
    served = await serve()

    async with http.post(f"{served.url}/v1/chat/completions", json=QUESTION) as response:
        usage = (await response.json())["usage"]

    assert usage["completion_tokens_details"] is None
    assert not served.backend.requests[0].sampling.return_text_lengths


@pytest.mark.parametrize(("settings", "created"), [({}, 32), ({"enable_prefix_caching": False}, 0)])
async def test_what_the_cache_gets(serve, http, settings, created):
    """The prompt's full blocks but for what was there; all three parts of a message's input add up to the prompt."""
    served = await serve(answers=False, **settings)
    asking = asyncio.create_task(
        http.post(f"{served.url}/v1/messages", json={**QUESTION, "max_tokens": 9, "stream": True})
    )
    (request,) = await served.backend.requested()
    sizes = {"num_prompt_tokens": 50, "num_cached_tokens": 16}

    await served.backend.send(served.address, batch([Delta(request.request_id, "a", 1, finish_reason="stop", **sizes)]))

    async with await asking as response:
        told = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
    begin, end = told[0]["message"], told[-2]
    assert begin["id"].startswith("msg_")
    assert begin["usage"] == {"input_tokens": 50, "output_tokens": 0}
    assert end["usage"] == {
        "input_tokens": 34 - created, "cache_creation_input_tokens": created, "cache_read_input_tokens": 16,
        "output_tokens": 1,
    }  # fmt: skip


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_usage_of_each_chunk_has_the_fields_of_the_last(serve, http, path):
    """It is written without a dictionary for each token, and says the same."""
    served = await serve()
    body = {"prompt": "a b"} if path == "completions" else QUESTION
    async with http.post(f"{served.url}/v1/{path}", json={**body, **STREAM}) as response:
        text = await response.text()

    *chunks, ended, last = [json.loads(line[6:])["usage"] for line in text.split("\n\n")[:-2]]
    assert ended == last
    assert all(list(each) == list(last) for each in chunks)


async def test_tokens_of_a_prediction(serve, http):
    """Those that occurred, and those that did not, beside those of reasoning: at the end, and in every chunk."""
    usages = []
    for more in ({}, STREAM):
        served = await serve(answers=False, model=REASONING)
        body = {**QUESTION, "prediction": {"type": "content", "content": "Yes. No."}, "n": 2, **more}
        asking = asyncio.create_task(http.post(f"{served.url}/v1/chat/completions", json=body))
        (request,) = await served.backend.requested()
        assert request.prediction == "Yes. No."
        for counts, finish in ((((0, 4), (1, 3)), None), (((2, 2), (4, 0)), "stop")):
            deltas = [Delta(request.request_id, "x", 1 + bool(finish), choice_index=index, finish_reason=finish,
                            text_offset=int(bool(finish))) for index in range(2)]  # fmt: skip
            occurred, missed = np.array(counts, np.int32).T
            sent = structs.replace(batch(deltas), num_predicted=occurred.copy(), num_unpredicted=missed.copy())
            await served.backend.send(served.address, sent)
        async with await asking as response:
            text = await response.text()
        chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]] if more else [json.loads(text)]
        usages.append([chunk["usage"]["completion_tokens_details"] for chunk in chunks])

    whole = {"reasoning_tokens": 0, "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}
    assert usages[0] == [whole]
    assert usages[1][-1] == whole
    told = [each for each in usages[1] if "accepted_prediction_tokens" in each]
    assert {"reasoning_tokens": 0, "accepted_prediction_tokens": 4, "rejected_prediction_tokens": 0} in told
