"""What ``/v1/embeddings`` takes, refuses and answers."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from fake_backend import MODEL

from web.embeddings import embedding, parse_embedding
from web.errors import ApiError
from web.report import EmbeddingForm

STATE = np.array([3, 4, 12, 0], np.float32)


def test_vectors_have_length_one():
    """Also when cut, and nothing but zeros stays zeros."""
    assert embedding(STATE, EmbeddingForm()) == pytest.approx([3 / 13, 4 / 13, 12 / 13, 0])
    assert embedding(STATE, EmbeddingForm(dimensions=2)) == pytest.approx([0.6, 0.8])
    assert embedding(STATE * 0, EmbeddingForm()) == [0, 0, 0, 0]


def test_base64_are_floats():
    """Little-endian, four bytes each."""
    told = embedding(STATE, EmbeddingForm(dimensions=2, base64=True))

    assert np.frombuffer(base64.b64decode(told), "<f4") == pytest.approx([0.6, 0.8])


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
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"input": "a", "messages": []}, "messages"),
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
