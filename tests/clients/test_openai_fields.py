"""OpenAI's own client: fields beside the common ones, as it sends them."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.helpers.waiting import LIMIT_S


@pytest.fixture
def client(base_url, expects) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key=expects.api_key, max_retries=0, timeout=LIMIT_S) as client:
        yield client


def ask(client, expects, content, **options):
    return client.chat.completions.create(
        model=expects.model, messages=[{"role": "user", "content": content}],
        **{"max_completion_tokens": 8, "temperature": 0, **options},
    )  # fmt: skip


def test_parts_of_a_message(client, expects):
    """Text in parts is text."""
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "a dog?"}]

    assert ask(client, expects, parts).choices == ask(client, expects, "What is\na dog?").choices


def test_fields_that_change_nothing(client, expects):
    """Those that need no behaviour here are taken."""
    answer = ask(
        client, expects, expects.question, user="u", metadata={"a": "b"}, store=False, service_tier="auto", n=1,
        safety_identifier="s", prompt_cache_key="k", modalities=["text"], parallel_tool_calls=True, top_p=1.0,
        response_format={"type": "text"}, reasoning_effort="low",
    )  # fmt: skip

    assert answer.choices == ask(client, expects, expects.question).choices


def test_limits_of_tokens(client, expects):
    """``max_completion_tokens`` wins over the older name."""
    answer = ask(client, expects, expects.question, max_tokens=50, max_completion_tokens=2)

    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (2, "length")


def test_usage_in_every_chunk(client, expects):
    """With vLLM's ``continuous_usage_stats`` tokens are counted as they come."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, expects, expects.question, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]

    assert counts == sorted(counts)
    assert chunks[-1].choices == []
    assert counts[-1] == chunks[-1].usage.total_tokens - chunks[-1].usage.prompt_tokens


def test_the_id_of_a_request(client, expects):
    """An answer's id has the client's own in it."""
    answer = ask(client, expects, expects.question, extra_headers={"X-Request-Id": "order-66"})

    assert answer.id == "chatcmpl-order-66"


def test_a_message_that_is_continued(client, expects):
    """With vLLM's ``continue_final_message`` the answer goes on with what the assistant has said."""
    messages = [{"role": "user", "content": expects.question}, {"role": "assistant", "content": "It is a"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    answer = client.chat.completions.create(
        model=expects.model, messages=messages, max_tokens=4, temperature=0, extra_body=extra
    )

    assert answer.choices[0].message.content.startswith("It is a")


@pytest.mark.parametrize("field", ["input", "messages"])
def test_embeddings_of_conversations(client, expects, field):
    """vLLM's: several of them, in either field, are as each of them alone."""
    conversations = [[{"role": "user", "content": text}] for text in (expects.question, "Another one")]

    def embed(value):
        extra = {"extra_body": {"input": None, field: value}} if field == "messages" else {}
        told = client.embeddings.create(model=expects.model, input=value if not extra else "", **extra)
        return [each.embedding for each in told.data]

    both = embed(conversations)
    for vector, conversation in zip(both, conversations, strict=True):
        (alone,) = embed(conversation)
        assert vector == pytest.approx(alone, abs=1e-5)


def test_offsets_of_a_rendered_prompt(client, expects):
    """vLLM's ``return_token_offsets``: of each token, in the prompt; of token ids there are none."""
    body = {"model": expects.model, "prompt": expects.prompt, "return_token_offsets": True}
    (told,) = client.post("/completions/render", body=body, cast_to=object)
    (ids,) = client.post("/completions/render", body={**body, "prompt": told["token_ids"]}, cast_to=object)

    assert len(told["token_offsets"]) == len(told["token_ids"])
    pieces = [expects.prompt[begin:end] for begin, end in told["token_offsets"]]
    assert "".join(pieces).replace(" ", "") == expects.prompt.replace(" ", "")
    assert ids["token_offsets"] is None


def test_a_budget_of_thoughts_needs_reasoning(client, expects):
    """Where the server reads none the field is a 400, but for -1."""
    create = client.completions.create
    assert create(model=expects.model, prompt="x", max_tokens=1, extra_body={"thinking_token_budget": -1}).choices
    with pytest.raises(openai.BadRequestError) as caught:
        create(model=expects.model, prompt="x", extra_body={"thinking_token_budget": 5})
    assert caught.value.param == "thinking_token_budget"


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("suffix", {"suffix": "end"}),
        ("store", {"extra_body": {"store": True}}),
        ("temprature", {"extra_body": {"temprature": 1}}),
        ("stream_options", {"extra_body": {"stream_options": {}}}),
        ("prompt_embeds", {"extra_body": {"prompt_embeds": "x"}}),
    ],
)
def test_fields_that_are_refused(client, expects, param, options):
    """A 400 that names the field."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=expects.model, prompt="x", **options)

    assert caught.value.param == param
