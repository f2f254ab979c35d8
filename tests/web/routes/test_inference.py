"""``/inference/v1/generate``: tokens in, tokens out."""

from __future__ import annotations

import json

import pytest

from pagebus.web.http.errors import ApiError
from pagebus.web.requests.token_body import parse_generate
from tests.web.fake_backend import MODEL

PATH = "/inference/v1/generate"


async def post(http, served, **body):
    async with http.post(served.url + PATH, json=body) as response:
        return response.status, await response.json()


async def test_whole(serve, http):
    """Ids, log probabilities by id, the prompt's ids, and what vLLM sends as null."""
    served = await serve()
    status, told = await post(http, served, token_ids=[5, 6], sampling_params={"n": 2, "logprobs": 1}, request_id="r")
    assert status == 200
    assert told["request_id"] == "generate-tokens-r"
    assert told["prompt_token_ids"] == [1, 2]  # as the fake tokenizer tells it
    first = told["choices"][0]
    assert (first["index"], first["token_ids"], first["finish_reason"]) == (0, [10, 11, 12, 13, 14, 15], "stop")
    assert first["logprobs"]["content"][1] == {
        "token_id": 11, "logprob": -1.25, "rank": None,
        "top_logprobs": [{"token_id": 11, "logprob": -1.25, "rank": None},
                         {"token_id": 21, "logprob": -0.25, "rank": 1}],
    }  # fmt: skip
    assert told["usage"]["completion_tokens"] == 6 + 7
    assert (told["metrics"], first["routed_experts"], told["kv_transfer_params"]) == (None, None, None)
    (request,) = served.backend.requests
    assert request.prompt_token_ids.tolist() == [5, 6]
    assert request.sampling.max_tokens is None


async def test_stream(serve, http):
    """The first chunk tells the prompt, the last one the usage."""
    served = await serve()
    body = {"token_ids": [5, 6], "sampling_params": {}, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post(served.url + PATH, json=body) as response:
        events = (await response.text()).strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(each.removeprefix("data: ")) for each in events]
    assert [token for each in chunks[:-1] for token in each["choices"][0]["token_ids"]] == [10, 11, 12, 13, 14, 15]
    assert [each["prompt_token_ids"] for each in chunks] == [[1, 2]] + [None] * (len(chunks) - 1)
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 6)


async def test_abort(serve, http):
    """By the id of the answer."""
    served = await serve()
    body = {"request_ids": ["generate-tokens-r"]}
    async with http.post(served.url + "/inference/v1/abort_requests", json=body) as response:
        assert await response.json() == {"status": "aborted", "aborted": 0}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 1000]}, "token_ids[1]"),
        ({"token_ids": [5], "sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"token_ids": [5], "sampling_params": {"output_kind": "all"}}, "sampling_params.output_kind"),
        ({"token_ids": [5], "sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        ({"token_ids": [5], "sampling_params": {"logit_bias": [1]}}, "sampling_params.logit_bias"),
        ({"token_ids": [5], "output_mode": "derender"}, "output_mode"),
        ({"token_ids": [5], "features": {}}, "features"),
        ({"token_ids": [5], "no_such_field": 1}, "no_such_field"),
        ({"token_ids": [5], "stream_options": {}}, "stream_options"),
    ],
)
def test_what_is_refused(body, param):
    """By the name that it has in this body."""
    with pytest.raises(ApiError) as caught:
        parse_generate(body, MODEL)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message
