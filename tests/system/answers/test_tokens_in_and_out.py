"""Tokens in, tokens out: rendered, generated and derendered is what the routes of chats and completions answer."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from pagebus.actors.model.config import SHIPPED_MODEL
from tests.system.serving import Client, serving

CHAT = {"messages": [{"role": "user", "content": "What is a dog?"}], "temperature": 0, "max_tokens": 12}


async def post(client: Client, path: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(client.url + path, json=body) as response:
        return response.status, await response.json()


async def test_there_and_back() -> None:
    """Message and usage are those of the chat; with n, stop strings and a schema too."""
    async with serving(SHIPPED_MODEL) as client:
        for more in ({}, {"n": 2, "seed": 3, "temperature": 1.0}, {"structured_outputs": {"choice": ["yes", "no"]}}):
            whole = await client.post("chat/completions", **{**CHAT, **more})
            status, rendered = await post(client, "/v1/chat/completions/render", {**CHAT, **more})
            assert status == 200, rendered
            assert len(rendered["token_ids"]) == whole["usage"]["prompt_tokens"]
            status, generated = await post(client, "/inference/v1/generate", rendered)
            assert status == 200, generated
            body = {"generate_response": generated, "prompt_tokens": len(rendered["token_ids"]),
                    "prompt_token_ids": rendered["token_ids"], "chat_request": {**CHAT, **more}}  # fmt: skip
            status, told = await post(client, "/v1/chat/completions/derender", body)
            assert status == 200, told
            if "seed" not in more:  # a seed's noise depends on the request's id, too, if there are several choices
                assert [each["message"] for each in told["choices"]] == [each["message"] for each in whole["choices"]]
            assert [each["finish_reason"] for each in told["choices"]] == [
                each["finish_reason"] for each in whole["choices"]
            ]
            assert told["usage"]["total_tokens"] == sum(len(each["token_ids"]) for each in generated["choices"]) + len(
                rendered["token_ids"]
            )


async def test_completions() -> None:
    """One answer for each prompt."""
    async with serving(SHIPPED_MODEL) as client:
        body = {"prompt": ["A dog is", "Water"], "temperature": 0, "max_tokens": 8}
        whole = await client.post("completions", **body)
        _, rendered = await post(client, "/v1/completions/render", body)
        assert [each["sampling_params"]["max_tokens"] for each in rendered] == [8, 8]
        answers = [(await post(client, "/inference/v1/generate", each))[1] for each in rendered]
        status, told = await post(client, "/v1/completions/derender", {"generate_responses": answers})
        assert status == 200, told
        assert [each["text"] for each in told["choices"]] == [each["text"] for each in whole["choices"]]
        for path, other in (
            ("/v1/messages/render", {"messages": CHAT["messages"], "max_tokens": 5}),
            ("/v1/responses/render", {"input": "What is a dog?"}),
        ):
            status, rendered = await post(client, path, other)
            assert (status, len(rendered["token_ids"]) > 3) == (200, True), rendered


@pytest.mark.parametrize("flag", ["skip_tokenizer_init", "tokens_only"])
async def test_without_a_tokenizer(flag) -> None:
    """Token ids go in and out; a text is refused, or its route is not there."""
    async with serving(SHIPPED_MODEL, **{flag: True}) as client:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_tokens": 4, "ignore_eos": True}}
        status, told = await post(client, "/inference/v1/generate", body)
        assert status == 200, told
        assert len(told["choices"][0]["token_ids"]) == 4
        body["sampling_params"]["stop"] = ["x"]
        status, told = await post(client, "/inference/v1/generate", body)
        assert (status, told["error"]["param"]) == (400, "sampling_params.stop")
        status, told = await post(client, "/v1/completions", {"prompt": "a text"})
        assert status == (404 if flag == "tokens_only" else 400)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "generate_response"),
        ({"generate_response": {"choices": []}}, "generate_response.choices"),
        ({"generate_response": {"choices": [{"token_ids": "x"}]}}, "generate_response.choices[0].token_ids"),
        ({"generate_response": {"choices": [{"token_ids": [1], "logprobs": {}}]}},
         "generate_response.choices[0].logprobs"),
        ({"stream": True, "generate_response": {"choices": [{"token_ids": [1]}]}}, "stream"),
        ({"generate_response": {"choices": [{"token_ids": [1]}]}, "prompt_token_ids": [-1]}, "prompt_token_ids[0]"),
    ],
)  # fmt: skip
async def test_what_is_refused(body, param) -> None:
    from pagebus.web.answers.derendered import parse_derender_chat
    from pagebus.web.http.errors import ApiError
    from pagebus.web.requests.served_model import ServedModel

    with pytest.raises(ApiError) as caught:
        parse_derender_chat(body, ServedModel(names=("m",), vocab_size=100))
    assert (caught.value.status, caught.value.param) == (400, param)
