"""What ``/v1/embeddings`` takes, refuses and answers."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagebus.web.calls.answer_details import EmbeddingForm
from pagebus.web.calls.number_formats import to_bytes
from pagebus.web.http.errors import ApiError
from pagebus.web.requests.embeddings import as_json, parse_embedding, vector_of
from tests.web.fake_backend import MODEL

STATE = np.array([3, 4, 12, 0], np.float32)


def test_vectors_have_length_one():
    """Also when cut, and nothing but zeros stays zeros."""
    assert vector_of(STATE, EmbeddingForm()).tolist() == pytest.approx([3 / 13, 4 / 13, 12 / 13, 0])
    assert vector_of(STATE, EmbeddingForm(dimensions=2)).tolist() == pytest.approx([0.6, 0.8])
    assert vector_of(STATE * 0, EmbeddingForm()).tolist() == [0, 0, 0, 0]


def test_base64_are_floats():
    """Four bytes each, unless another number format or byte order is asked for."""
    form = EmbeddingForm(dimensions=2, encoding="base64")

    def told(**changes: Any) -> bytes:
        changed = replace(form, **changes)
        return base64.b64decode(as_json(vector_of(STATE, changed), changed))

    assert np.frombuffer(told(), "<f4") == pytest.approx([0.6, 0.8])
    assert np.frombuffer(told(dtype="float16", order="big"), ">f2") == pytest.approx([0.6, 0.8], abs=1e-3)
    assert np.frombuffer(told(normalize=False), "<f4").tolist() == [3, 4]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_numbers_are_those_of_torch(dtype):
    """Rounded as torch rounds them, from tiny to too large."""
    types = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    generator = np.random.default_rng(0)
    scaled = [generator.standard_normal(2000) * scale for scale in (1e-5, 1e-2, 1, 300, 5e4)]
    edges = [0.0, -0.0, 448, 464, 465, 57344, 61439, 61440, np.inf, -np.inf]
    vector = np.concatenate([*scaled, edges]).astype(np.float32)

    told = np.frombuffer(to_bytes(vector, dtype, "native"), np.uint8)
    torchs = torch.from_numpy(vector).to(types.get(dtype) or getattr(torch, dtype)).view(torch.uint8).numpy()

    assert told.tolist() == torchs.tolist()
    width = len(told) // len(vector)
    swapped = np.frombuffer(to_bytes(vector, dtype, "big"), np.uint8).reshape(-1, width)[:, ::-1]
    assert swapped.reshape(-1).tolist() == np.frombuffer(to_bytes(vector, dtype, "little"), np.uint8).tolist()


async def test_bytes(serve, http):
    """All vectors one after another; a header says where each lies, unless only the bytes are wanted."""
    served = await serve()
    body = {"input": ["a b", "c"], "encoding_format": "bytes", "embed_dtype": "float16", "endianness": "little"}

    async with http.post(f"{served.url}/v1/embeddings", json=body) as response:
        told, data = json.loads(response.headers["metadata"]), await response.read()
        kind = response.content_type
    async with http.post(f"{served.url}/v1/embeddings", json={**body, "encoding_format": "bytes_only"}) as response:
        alone = await response.read(), "metadata" in response.headers

    assert (kind, alone) == ("application/octet-stream", (data, False))
    assert told["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [(each["start"], each["end"], each["shape"]) for each in told["data"]] == [(0, 16, [8]), (16, 32, [8])]
    first = np.frombuffer(data[:16], "<f2").astype(np.float32)
    assert first[:2] == pytest.approx([2 / 8**0.5, 2 / 8**0.5], abs=1e-3)


def test_a_conversation():
    """Is rendered by the template, by default without the beginning of an answer."""
    messages = [{"role": "user", "content": "a"}]

    asked = parse_embedding({"messages": messages, "chat_template_kwargs": {"a": 1}}, MODEL)

    assert [prompt.messages for prompt in asked.prompts] == [tuple(messages)]
    assert (asked.add_generation_prompt, asked.add_special_tokens) == (False, False)
    assert asked.chat_template_kwargs == {"a": 1}
    assert asked.sampling.pooling == "last"


@pytest.mark.parametrize("field", ["messages", "input"])
@pytest.mark.parametrize("batched", [False, True])
def test_several_conversations(field, batched):
    """As an array of them, in either field: each is a prompt, and the template is told the same of all."""
    given = [[{"role": "user", "content": "a"}], [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]]
    value = given if batched else given[1]

    asked = parse_embedding({field: value, "add_generation_prompt": True}, MODEL)

    assert [list(prompt.messages) for prompt in asked.prompts] == (given if batched else [given[1]])
    assert (asked.add_generation_prompt, asked.add_special_tokens) == (True, False)


def test_the_first_tokens_are_kept():
    """As in vLLM, where texts are embedded; the client may want the last."""
    assert parse_embedding({"input": "a"}, MODEL).truncation_side == "right"
    assert parse_embedding({"input": "a", "truncation_side": "left"}, MODEL).truncation_side == "left"


def test_dimensions_of_a_model_that_says_which():
    """Others are a 400 that names those there are."""
    model = replace(MODEL, matryoshka_dimensions=(2, 4))

    assert parse_embedding({"input": "a", "dimensions": 4}, model).details.embedding.dimensions == 4
    with pytest.raises(ApiError, match="2, 4, got 3"):
        parse_embedding({"input": "a", "dimensions": 3}, model)


@pytest.mark.parametrize(
    ("value", "texts", "ids"),
    [
        ("a b", ["a b"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([1, 2], [None], [[1, 2]]),
        ([[1, 2], [3]], [None, None], [[1, 2], [3]]),
    ],
)
def test_inputs(value, texts, ids):
    """A text, texts, tokens, lists of tokens; each becomes one request that samples one token."""
    asked = parse_embedding({"input": value}, MODEL)

    assert [prompt.text for prompt in asked.prompts] == texts
    assert [None if prompt.token_ids is None else prompt.token_ids.tolist() for prompt in asked.prompts] == ids
    assert (asked.sampling.pooling, asked.sampling.max_tokens, asked.sampling.n) == ("last", 1, 1)


def test_as_many_inputs_as_openai_takes():
    """2048, in whatever form."""
    messages = [[{"role": "user", "content": "a"}]]

    for body in ({"input": ["a"] * 2048}, {"input": [[1]] * 2048}, {"messages": messages * 2048}):
        assert len(parse_embedding(body, MODEL).prompts) == 2048


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [1000]}, "input[0]"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"input": "a", "messages": []}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": [[{"role": "user", "content": "a"}], "b"]}, "messages[1]"),
        ({"messages": [[{"role": "user", "content": "a"}], [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": [{"role": "user", "content": "a"}, []]}, "messages[1]"),
        ({"messages": [[{"role": "user", "content": "a"}]] * 2049}, "messages"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [[1]] * 2049}, "input"),
        ({"input": [[{"role": "nobody", "content": "a"}]]}, "input[0][0].role"),
        ({"input": ["a", {"role": "user", "content": "a"}]}, "input[1]"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype"),
        ({"input": "a", "endianness": "middle"}, "endianness"),
        ({"input": "a", "truncation_side": "both"}, "truncation_side"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "user": 1}, "user"),
    ],
)
def test_refusals(body, param):
    """Name the field."""
    with pytest.raises(ApiError) as caught:
        parse_embedding(body, MODEL)

    assert (caught.value.status, caught.value.param) == (400, param)


async def test_answer(serve, http):
    """OpenAI's shape, in the order of the inputs; no output tokens are counted."""
    served = await serve()
    body = {"input": ["a b c d", "a"], "dimensions": 2, "model": MODEL.name}

    async with http.post(f"{served.url}/v1/embeddings", json=body) as response:
        answer = await response.json()

    assert response.status == 200
    assert answer["id"].startswith("embd-")
    assert (answer["object"], answer["model"]) == ("list", MODEL.name)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(0, "embedding"), (1, "embedding")]
    for told, count in zip(answer["data"], (4, 1), strict=True):
        length = (count**2 + 4) ** 0.5
        assert told["embedding"] == pytest.approx([count / length, 2 / length])
    assert {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 5,
        "completion_tokens": 0,
        "total_tokens": 5,
    }
