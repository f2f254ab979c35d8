"""The unmodified ``openai`` client: it must not notice that this is not OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.helpers.waiting import LIMIT_S


@pytest.fixture
def client(base_url, expects) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key=expects.api_key, max_retries=0, timeout=LIMIT_S) as client:
        yield client


@pytest.fixture
async def async_client(base_url, expects) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=expects.api_key, max_retries=0, timeout=LIMIT_S) as client:
        yield client


def greedy(client: openai.OpenAI, expects, **options):
    options = {"max_tokens": expects.min_tokens, "temperature": 0, "extra_body": {"ignore_eos": True}} | options
    return client.completions.create(model=expects.model, prompt=expects.prompt, **options)


def question(expects) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": expects.question}]


def test_models(client, expects):
    """The model is listed, and can be looked up."""
    assert expects.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(expects.model).object == "model"


def test_completion(client, expects):
    """A completion has text, an end and a usage that adds up."""
    answer = greedy(client, expects)

    assert (answer.object, answer.model) == ("text_completion", expects.model)
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert choice.text
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert answer.usage.completion_tokens == expects.min_tokens
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_known_text(client, expects):
    """The text is the one the server is known to say."""
    if expects.completion is None:
        pytest.skip("this server's text is not known")
    answer = client.completions.create(model=expects.model, prompt=expects.prompt, temperature=0)

    assert answer.choices[0].text == expects.completion
    assert answer.choices[0].finish_reason == "stop"


def test_max_tokens_default(client, expects):
    """A completion without max_tokens has 16 at most."""
    answer = greedy(client, expects, max_tokens=openai.NOT_GIVEN)

    assert answer.usage.completion_tokens == 16


def test_completion_stream(client, expects):
    """The stream's text is the whole answer's; only its last chunk has a finish reason."""
    whole = greedy(client, expects)

    with greedy(client, expects, stream=True) as stream:
        chunks = list(stream)

    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert not any(chunk.choices[0].finish_reason for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_usage(client, expects):
    """With include_usage the last chunk has the usage and no choice, the others no usage."""
    whole = greedy(client, expects)

    with greedy(client, expects, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = list(stream)

    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks)


def test_token_prompts(client, expects):
    """Prompts as token ids, one and many."""
    one = client.completions.create(model=expects.model, prompt=[5, 6, 7], max_tokens=4)
    many = client.completions.create(model=expects.model, prompt=[[5, 6, 7], [8]], max_tokens=4)

    assert one.usage.prompt_tokens == 3
    assert many.usage.prompt_tokens == 4
    assert [choice.index for choice in many.choices] == [0, 1]


def test_many_prompts(client, expects):
    """Each prompt has its answers, in order, and each is what it would be alone."""
    alone = greedy(client, expects).choices[0].text

    answer = client.completions.create(
        model=expects.model, prompt=[expects.prompt, expects.question, expects.prompt], temperature=0,
        max_tokens=expects.min_tokens, extra_body={"ignore_eos": True},
    )  # fmt: skip

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[0].text == answer.choices[2].text == alone


def test_n(client, expects):
    """n choices for one prompt, whose tokens count once."""
    one = greedy(client, expects)
    answer = greedy(client, expects, n=3, temperature=1, seed=1)

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens == 3 * expects.min_tokens


def test_stop(client, expects):
    """The text ends before the stop string, streamed or not."""
    text = greedy(client, expects).choices[0].text
    stop = text[len(text) // 2 :][:4]

    answer = greedy(client, expects, stop=[stop, "\x00 never"])
    with greedy(client, expects, stop=stop, stream=True) as stream:
        streamed = "".join(chunk.choices[0].text for chunk in stream)

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == streamed == text[: text.index(stop)]
    assert answer.choices[0].stop_reason == stop


def test_chat(client, expects):
    """A chat has an assistant's message."""
    answer = client.chat.completions.create(model=expects.model, messages=question(expects), max_completion_tokens=8)

    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.index) == ("assistant", 0)
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= 8


def test_chat_goes_on(client, expects):
    """The answer can be sent back as it came, as clients do."""
    messages = question(expects)
    first = client.chat.completions.create(model=expects.model, messages=messages, max_tokens=8)

    more = {"role": "user", "content": [{"type": "text", "text": "More?"}]}
    answer = client.chat.completions.create(
        model=expects.model, messages=[*messages, first.choices[0].message, more], max_tokens=8
    )

    assert answer.usage.prompt_tokens > first.usage.prompt_tokens


def test_chat_stream(client, expects):
    """Role first, then content, then the finish reason; the text is the whole answer's."""
    options = {"max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(model=expects.model, messages=question(expects), **options)

    with client.chat.completions.create(
        model=expects.model, messages=question(expects), stream=True, stream_options={"include_usage": True}, **options
    ) as stream:
        *chunks, last = list(stream)

    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage


def test_the_stream_helper(client, expects):
    """The client's own accumulator understands the chunks."""
    with client.chat.completions.stream(model=expects.model, messages=question(expects)) as stream:
        final = stream.get_final_completion()

    assert final.choices[0].message.content


def test_completion_logprobs(client, expects):
    """Every token with its log probability and its place in the text; the echoed prompt too."""
    spelled = {"ignore_eos": True, "skip_special_tokens": False}
    answer = greedy(client, expects, logprobs=2, max_tokens=4, extra_body=spelled)
    echoed = greedy(client, expects, logprobs=2, max_tokens=4, echo=True, extra_body=spelled)

    told, whole = answer.choices[0].logprobs, echoed.choices[0].logprobs
    assert "".join(told.tokens) == answer.choices[0].text
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 4
    assert all(value <= 0 for value in told.token_logprobs)
    assert all(tops[token] == value for tops, token, value in
               zip(told.top_logprobs, told.tokens, told.token_logprobs, strict=True))  # fmt: skip
    assert echoed.choices[0].text == expects.prompt + answer.choices[0].text
    assert whole.token_logprobs[0] is None
    assert whole.tokens[-4:] == told.tokens


def test_chat_logprobs(client, expects):
    """The same whole and streamed; bytes spell the text."""
    options = {"max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2, "model": expects.model}
    whole = client.chat.completions.create(messages=question(expects), **options)
    with client.chat.completions.create(messages=question(expects), stream=True, **options) as stream:
        parts = [chunk.choices[0].logprobs for chunk in stream]

    content = whole.choices[0].logprobs.content
    assert 0 < len(content) <= 4
    assert b"".join(bytes(entry.bytes) for entry in content).decode().startswith(whole.choices[0].message.content)
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert [entry for part in parts if part for entry in part.content] == content


def test_the_stream_helper_with_logprobs(client, expects):
    """The client's own accumulator understands them."""
    with client.chat.completions.stream(
        model=expects.model, messages=question(expects), temperature=0, logprobs=True
    ) as stream:
        final = stream.get_final_completion()

    assert final.choices[0].logprobs.content


def test_raw_headers(client, expects):
    """The request id comes back."""
    answer = client.completions.with_raw_response.create(
        model=expects.model, prompt=expects.prompt, max_tokens=1, extra_headers={"X-Request-Id": "from-a-client"}
    )

    assert answer.headers["x-request-id"] == "from-a-client"
    assert answer.parse().id == "cmpl-from-a-client"


def test_wrong_model(client, expects):
    """A model that is not there."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="no-such-model", prompt="x")
    assert (caught.value.code, caught.value.param) == ("404", "model")
    assert caught.value.body["reason"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"temperature": 3}, {"tempature": 1}, {"functions": [{"name": "f"}]}])
def test_bad_field(client, expects, body, stream):
    """A field out of range, unknown, or not supported yet."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=expects.model, messages=question(expects), stream=stream, extra_body=body)
    assert caught.value.param == next(iter(body))


@pytest.mark.parametrize("stream", [False, True])
def test_too_long(client, expects, stream):
    """A prompt that does not fit the context is refused, before any stream begins."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=expects.model, prompt=[5] * (expects.max_model_len + 1), stream=stream)
    assert str(expects.max_model_len) in str(caught.value)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=expects.model, prompt="x", max_tokens=expects.max_model_len + 1)


def test_wrong_key(base_url, expects):
    """A key that is not one."""
    if expects.api_key == "none":
        pytest.skip("this server asks for no key")
    with (
        openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


async def test_parallel_streams(async_client, expects):
    """Many streams at once, each with its own whole text."""

    async def ask() -> str:
        stream = await async_client.completions.create(
            model=expects.model, prompt=expects.prompt, temperature=0, max_tokens=expects.min_tokens, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return "".join([chunk.choices[0].text async for chunk in stream])

    texts = await asyncio.gather(*(ask() for _ in range(32)))

    assert len(set(texts)) == 1
    assert texts[0]


async def test_leaving_a_stream(async_client, expects):
    """A stream that is closed early leaves the server able to answer."""
    for _ in range(5):
        stream = await async_client.completions.create(
            model=expects.model, prompt=expects.prompt, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()

    answer = await async_client.completions.create(model=expects.model, prompt=expects.prompt, max_tokens=1)
    assert answer.usage.completion_tokens == 1


def test_embeddings(client, expects):
    """Vectors of length 1, which the client asks for in base64 and decodes; cut ones; several at once."""
    texts = [expects.prompt, expects.question]
    answer = client.embeddings.create(model=expects.model, input=texts)
    numbers = client.embeddings.create(model=expects.model, input=expects.prompt, encoding_format="float")
    short = client.embeddings.create(model=expects.model, input=[[1, 2, 3], [4]], dimensions=4)

    assert [(each.index, each.object) for each in answer.data] == [(0, "embedding"), (1, "embedding")]
    assert sum(number**2 for number in answer.data[0].embedding) == pytest.approx(1, abs=1e-5)
    assert answer.data[0].embedding == pytest.approx(numbers.data[0].embedding, abs=1e-5)
    assert [len(each.embedding) for each in short.data] == [4, 4]
    assert (short.usage.prompt_tokens, short.usage.total_tokens) == (4, 4)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=expects.model, input="x", dimensions=10**6)
