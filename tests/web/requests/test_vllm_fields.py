"""Fields that clients of vLLM send: what is asked of the system, and what is refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from pagebus.bus.messages import RepetitionDetection, RequestFailed
from pagebus.web.http.errors import ApiError
from pagebus.web.requests.openai import parse_chat, parse_completion
from pagebus.web.routes.generate.tokens import parse_tokenize
from tests.helpers.waiting import until
from tests.web.fake_backend import MODEL, Delta, batch

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
parsers = pytest.mark.parametrize(
    "parse", [lambda **body: parse_completion({"prompt": "x", **body}, MODEL),
              lambda **body: parse_chat({**CHAT, **body}, MODEL)],
    ids=["completion", "chat"],
)  # fmt: skip


@parsers
def test_repetition_detection(parse):
    """With vLLM's defaults; a largest size of 0 asks for nothing."""
    asked = parse(repetition_detection={"max_pattern_size": 5, "min_count": 3})
    assert asked.sampling.repetition_detection == RepetitionDetection(max_pattern_size=5, min_count=3)
    asked = parse(repetition_detection={"max_pattern_size": 5, "min_pattern_size": 2, "min_count": 3})
    assert asked.sampling.repetition_detection.min_pattern_size == 2
    for nothing in (None, {}, {"max_pattern_size": 0}):
        assert parse(repetition_detection=nothing).sampling.repetition_detection is None
    for given, field in (
        ({"max_pattern_size": 5}, "min_count"),
        ({"max_pattern_size": 5, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 10**6, "min_count": 2}, "max_pattern_size"),
        ({"max_patern_size": 1}, "max_patern_size"),
    ):
        with pytest.raises(ApiError) as caught:
            parse(repetition_detection=given)
        assert (caught.value.status, caught.value.param) == (400, f"repetition_detection.{field}")


@parsers
def test_other_fields(parse):
    """What they become, and what they may be."""
    asked = parse(truncation_side="right", truncate_prompt_tokens=4, detokenize=False, stream_interval=3)
    assert (asked.truncation_side, asked.sampling.detokenize, asked.stream_options.interval) == ("right", False, 3)
    assert parse().truncation_side == "left"
    assert parse(return_token_offsets=True).sampling == parse().sampling
    for field, value in (
        ("truncation_side", "up"), ("stream_interval", 0), ("detokenize", "no"), ("return_token_offsets", 1)
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            parse(**{field: value})
        assert (caught.value.status, caught.value.param) == (400, field)
    with pytest.raises(ApiError, match="stop: needs detokenize"):
        parse(stop="x", detokenize=False)


@parsers
def test_null_is_absent(parse):
    """Whatever the field; with a value it is a 400."""
    assert parse(nobody_knows_this=None).sampling == parse().sampling
    with pytest.raises(ApiError, match="nobody_knows_this: unknown field"):
        parse(nobody_knows_this=0)


@parsers
@pytest.mark.parametrize(
    ("seed", "limit"), [(2**63, "at most 9223372036854775807"), (-(2**63) - 1, "at least -92233720")]
)
def test_the_bounds_of_a_seed(parse, seed, limit):
    """The one that was passed is named."""
    with pytest.raises(ApiError, match=f"^seed: must be {limit}"):
        parse(seed=seed)
    assert parse(seed=2**63 - 1).sampling.seed == 2**63 - 1


def test_the_prompt_of_a_chat_with_tools():
    """Its tokens can be told by a server that could not answer it: what concerns the answer changes nothing."""
    with pytest.raises(ApiError):
        parse_chat({**CHAT, "tools": [TOOL]}, MODEL)
    for more in (
        {},
        {"tool_choice": "auto"},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ):
        asked, _ = parse_tokenize({**CHAT, "tools": [TOOL], **more}, MODEL)
        assert [tool["function"]["name"] for tool in asked.tools] == ["f"]
        assert asked.sampling.structured_output is None
    assert parse_tokenize({**CHAT, "tools": []}, MODEL)[0].tools == ()


async def chunks_of(serve, http, sizes, **body):
    """How many tokens had come with each chunk, of a stream whose tokens come in batches of these sizes."""
    served = await serve(answers=False)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "stream": True, "stream_options": options, **body}
    asking = asyncio.create_task(http.post(f"{served.url}/v1/completions", json=body))
    (request,) = await served.backend.requested()
    inbox, count = served.actor.context.inbox, 0
    (opened,) = inbox.open_requests()
    for size in sizes:
        count += size
        finish = "stop" if count == sum(sizes) else None
        delta = Delta(request.request_id, "a" * size, count, finish_reason=finish, text_offset=count - size)
        await served.backend.send(served.address, batch([delta]))
        await until(lambda count=count: opened.choices[0].num_tokens == count)
        await asyncio.sleep(0)  # the handler writes, if it is to
    async with await asking as response:
        lines = (await response.text()).split("\n\n")[:-3]
    told = [json.loads(line[6:]) for line in lines]
    assert "".join(each["choices"][0]["text"] for each in told) == "a" * sum(sizes)
    return [each["usage"]["completion_tokens"] for each in told]


async def test_stream_interval(serve, http):
    """The first and the last chunk come at once, others when so many tokens are new."""
    assert await chunks_of(serve, http, [1] * 8, stream_interval=3) == [1, 4, 7, 8]
    assert await chunks_of(serve, http, [1, 2, 5, 1], stream_interval=4) == [1, 8, 9]
    assert await chunks_of(serve, http, [1] * 4) == [1, 2, 3, 4]


async def test_a_stream_that_fails_tells_what_has_come(serve, http):
    """Also what was to wait for more tokens."""
    served = await serve(answers=False)
    body = {"prompt": "x", "stream": True, "stream_interval": 100}
    asking = asyncio.create_task(http.post(f"{served.url}/v1/completions", json=body))
    (request,) = await served.backend.requested()
    for count, text in ((1, "a"), (2, "b"), (3, "c")):
        await served.backend.send(served.address, batch([Delta(request.request_id, text, count)]))
    failure = RequestFailed(request_id=request.request_id, status=500, error_type="InternalServerError", message="no")
    await served.backend.send(served.address, failure)

    async with await asking as response:
        lines = (await response.text()).split("\n\n")

    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if '"text"' in line]
    assert "".join(texts) == "abc"
    assert json.loads(lines[-3][6:])["error"]["message"] == "no"


async def test_log_probabilities_of_a_response(serve, http):
    """With each delta and in the whole; without the right word in ``include`` there are none."""
    served = await serve()
    body = {"input": "x", "max_output_tokens": 3, "top_logprobs": 1}
    wanted = {**body, "include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}

    async def ask(**body):
        async with http.post(f"{served.url}/v1/responses", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.text()

    whole, plain = json.loads(await ask(**wanted)), json.loads(await ask(**body))
    lines = [
        json.loads(line[6:]) for line in (await ask(**wanted, stream=True)).splitlines() if line.startswith("data:")
    ]

    (part,) = whole["output"][0]["content"]
    assert [(each["token"], each["logprob"]) for each in part["logprobs"]] == [
        ("Hello", -1.0), (" there", -1.25), (",", -1.5)
    ]  # fmt: skip
    assert [len(each["top_logprobs"]) for each in part["logprobs"]] == [1, 1, 1]
    assert (whole["top_logprobs"], plain["top_logprobs"]) == (1, 0)
    assert plain["output"][0]["content"][0]["logprobs"] == []
    deltas = [each["logprobs"] for each in lines if each["type"] == "response.output_text.delta"]
    done = next(each for each in lines if each["type"] == "response.output_text.done")
    assert [each for delta in deltas for each in delta] == done["logprobs"] == part["logprobs"]


async def test_a_response_that_is_told_again_has_its_log_probabilities(serve, http):
    """One from the background, whose record is made of events."""
    served = await serve()
    body = {"input": "x", "max_output_tokens": 3, "background": True, "include": ["message.output_text.logprobs"]}
    async with http.post(f"{served.url}/v1/responses", json=body) as response:
        name = (await response.json())["id"]

    async with http.get(f"{served.url}/v1/responses/{name}?stream=true") as response:
        await response.text()
    query = "include[]=message.output_text.logprobs"
    async with http.get(f"{served.url}/v1/responses/{name}?{query}") as response:
        found = await response.json()
    async with http.get(f"{served.url}/v1/responses/{name}?include[]=all") as response:
        assert response.status == 400

    assert len(found["output"][0]["content"][0]["logprobs"]) == 3


async def test_models_with_a_larger_limit(serve, http):
    """``--max-logprobs`` says how many may be told."""
    served = await serve(model=replace(MODEL, max_logprobs=50))
    for count, status in ((50, 200), (51, 400)):
        async with http.post(f"{served.url}/v1/completions", json={"prompt": "x", "logprobs": count}) as response:
            assert response.status == status
