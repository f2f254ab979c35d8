"""Anthropic's client, and OpenAI's for responses, files and batches, against a whole system."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import openai
import pytest

from tests.helpers.waiting import LIMIT_S

QUESTION = "What is a dog?"


@pytest.fixture
def client(base_url: str, expects) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key=expects.api_key, max_retries=0) as made:
        yield made


@pytest.fixture
def told(client: openai.OpenAI, expects) -> str:
    """What a chat answers to the question, greedily."""
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model=expects.model, messages=messages, max_tokens=12, temperature=0)
    return chat.choices[0].message.content or ""


def test_a_message_says_what_a_chat_says(base_url: str, expects, told: str) -> None:
    """Whole and as a stream."""
    import anthropic

    url = base_url.removesuffix("/v1")
    ask = {"model": expects.model, "max_tokens": 12, "messages": [{"role": "user", "content": QUESTION}]}
    with anthropic.Anthropic(base_url=url, api_key=expects.api_key, max_retries=0) as client:
        message = client.messages.create(**ask, extra_body={"temperature": 0})
        assert message.content[0].text == told
        with client.messages.stream(**ask, extra_body={"temperature": 0}) as stream:
            assert "".join(stream.text_stream) == told
        counted = client.messages.count_tokens(model=expects.model, messages=ask["messages"])
        assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_response_says_what_a_chat_says(client: openai.OpenAI, expects, told: str) -> None:
    """Whole, as a stream, and in the background, read again from the middle."""
    ask = {"model": expects.model, "input": QUESTION, "max_output_tokens": 12, "temperature": 0}
    response = client.responses.create(**ask)
    assert response.output_text == told
    counted = client.responses.input_tokens.count(model=expects.model, input=QUESTION)
    assert counted.input_tokens == response.usage.input_tokens
    with client.responses.create(**ask, stream=True) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == told
    response = client.responses.create(**ask, background=True)
    with client.responses.retrieve(response.id, stream=True, starting_after=1) as stream:
        events = list(stream)
    assert events[0].sequence_number == 2
    assert events[-1].response.output_text == told


def test_a_batch_says_what_a_chat_says(client: openai.OpenAI, expects, told: str) -> None:
    """Through files, the stream of jobs, and files again."""
    if not expects.is_whole:
        pytest.skip("needs a jobs actor")
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
    lines = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(5)]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline_s = time.monotonic() + LIMIT_S
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.2)
    output = client.files.content(batch.output_file_id or "").text
    answers = [json.loads(line)["response"]["body"]["choices"][0]["message"]["content"] for line in output.splitlines()]
    assert answers == [told] * 5
