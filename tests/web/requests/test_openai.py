"""What the bodies may hold: every field's range, every refusal, every default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagebus.bus.codec import decode, encode
from pagebus.bus.messages import SamplingParams
from pagebus.web.http.errors import ApiError
from pagebus.web.requests.openai import parse_chat, parse_completion, parse_json
from pagebus.web.requests.parsed_request import ParsedRequest, StreamOptions
from pagebus.web.requests.served_model import ServedModel

MODEL = ServedModel(names=("m", "alias"), vocab_size=100, max_model_len=64)
USER = {"role": "user", "content": "hi"}


def completion(**body: object) -> ParsedRequest:
    return parse_completion({"prompt": "x", **body}, MODEL)


def chat(**body: object) -> ParsedRequest:
    return parse_chat({"messages": [USER], **body}, MODEL)


def refused(parse, **body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**body)
    return caught.value


def test_completion_defaults():
    """Without fields: 16 tokens, vLLM's sampling, the first name of the model."""
    parsed = completion()

    assert parsed.model == "m"
    assert parsed.sampling == SamplingParams(max_tokens=16)
    assert (parsed.stream, parsed.stream_options, parsed.add_special_tokens) == (False, StreamOptions(), True)


def test_chat_defaults():
    """A chat may use the rest of the context, and its template brings its own special tokens."""
    parsed = chat()

    assert parsed.sampling == SamplingParams(max_tokens=None)
    assert (parsed.add_special_tokens, parsed.add_generation_prompt) == (False, True)
    assert parsed.prompts[0].messages == ({"role": "user", "content": "hi"},)


def test_null_means_default():
    """Every known field may be null."""
    fields = [
        "model", "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias",
        "stream", "stream_options", "user", "logprobs", "echo", "suffix", "best_of", "tools", "response_format",
        "priority", "cache_salt", "truncate_prompt_tokens", "add_special_tokens", "use_beam_search", "length_penalty",
        "early_stopping", "logprob_token_ids", "prompt_logprobs", "bad_words", "allowed_token_ids", "return_token_ids",
    ]  # fmt: skip

    assert completion(**dict.fromkeys(set(fields) - {"tools"})) == completion()
    assert chat(**dict.fromkeys(set(fields) - {"suffix", "best_of"})) == chat()


GOOD = [
    ("n", 64, 64), ("max_tokens", 64, 64), ("min_tokens", 16, 16), ("temperature", 0, 0.0), ("temperature", 2, 2.0),
    ("temperature", 0.001, 0.01), ("top_p", 1e-9, 1e-9), ("top_p", 1, 1.0), ("top_k", -1, 0), ("top_k", 0, 0),
    ("top_k", 7, 7), ("min_p", 0, 0.0), ("min_p", 1, 1.0), ("repetition_penalty", 1.2, 1.2),
    ("presence_penalty", -2, -2.0), ("frequency_penalty", 2, 2.0), ("seed", 0, 0), ("seed", -1, None),
    ("seed", 2**63 - 1, 2**63 - 1), ("seed", -(2**63), -(2**63)), ("stop", "a", ("a",)), ("stop", [], ()),
    ("stop", ["a", "b"], ("a", "b")), ("stop_token_ids", [0, 99], (0, 99)), ("ignore_eos", True, True),
    ("include_stop_str_in_output", True, True), ("skip_special_tokens", False, False),
    ("spaces_between_special_tokens", False, False), ("logit_bias", {"5": 1, "99": -200.0}, {5: 1.0, 99: -100.0}),
    ("bad_words", ["a", " b"], ("a", " b")), ("bad_words", [], ()), ("allowed_token_ids", [0, 99], (0, 99)),
    ("prompt_logprobs", 0, 0), ("prompt_logprobs", 20, 20), ("return_token_ids", True, True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_sampling_values(name, value, expected):
    """Values at the edges of the ranges are taken, and reach the bus as they should."""
    for parsed in (completion(**{name: value}), chat(**{name: value})):
        sampling = parsed.sampling
        assert getattr(sampling, name) == expected
        (message,) = parsed.messages_for_bus(["id"], "i", 0.0)
        assert decode(encode(message)).sampling == sampling


BAD = [
    ("n", 0), ("n", 65), ("n", True), ("n", 1.5), ("n", "1"), ("n", 2**70), ("max_tokens", 0), ("max_tokens", 65),
    ("max_tokens", 2**64), ("max_tokens", 1e999), ("min_tokens", -1), ("min_tokens", 17), ("temperature", -0.1),
    ("temperature", 2.1), ("temperature", True), ("temperature", "1"), ("temperature", float("nan")),
    ("temperature", float("inf")), ("top_p", 0), ("top_p", 1.01), ("top_k", -2), ("top_k", 2**31), ("top_k", 1.5),
    ("min_p", -1e-9), ("min_p", 1.1), ("repetition_penalty", 0), ("repetition_penalty", 1e9),
    ("presence_penalty", 2.5), ("frequency_penalty", -2.5), ("seed", 2**63), ("seed", 1.5), ("stop", ""),
    ("stop", 5), ("stop", ["a", ""]), ("stop", ["a", 5]), ("stop", ["a"] * 17), ("stop", "é" * 129),
    ("stop_token_ids", 5), ("stop_token_ids", [100]), ("stop_token_ids", [-1]), ("stop_token_ids", [True]),
    ("stop_token_ids", [1] * 129), ("ignore_eos", 1), ("ignore_eos", "true"), ("logit_bias", [1]),
    ("logit_bias", {"100": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"01": 1}), ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": "x"}), ("logit_bias", {"1": True}), ("logit_bias", {"\u0661": 1}),
    ("logit_bias", {str(i): 1 for i in range(301)}), ("stream", 1), ("stream", "yes"), ("stream_options", {}),
    ("model", 5), ("priority", 1.5), ("priority", 2**31), ("cache_salt", ""), ("cache_salt", 5),
    ("cache_salt", "x" * 257), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", 65),
    ("truncate_prompt_tokens", -2), ("add_special_tokens", 0), ("user", 5), ("store", True),
    ("bad_words", [""]), ("bad_words", ["x" * 1025]), ("allowed_token_ids", []), ("allowed_token_ids", [100]),
    ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("return_tokens_as_token_ids", 1),
    ("num_speculative_tokens", -1), ("num_speculative_tokens", 17), ("num_speculative_tokens", "4"),
    ("service_tier", "flex"), ("metadata", {"a": 1}), ("metadata", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values(name, value):
    """A value of a wrong type or out of range is a 400 that names the field."""
    for parse in (completion, chat):
        body = {name: value} | ({"max_tokens": 16} if name == "min_tokens" else {})
        error = refused(parse, **body)
        assert error.status == 400
        assert error.type == "BadRequestError"
        assert error.param.split(".")[0].split("[")[0] == name
        assert error.message.startswith(error.param)
        assert len(error.message) < 300


UNSUPPORTED = [
    ("suffix", "x"), ("prompt_embeds", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_unsupported_completion_fields(name, value):
    """A feature that is not there is a 400 that says so, unless it is asked for with its default."""
    error = refused(completion, **{name: value})

    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    assert "not supported; leave it out" in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logit_bias": {"5": 1, "100": 1}}, "logit_bias.100"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"stop_token_ids": [5, 100]}, "stop_token_ids[1]"),
        ({"prompt": [5, 100]}, "prompt[1]"),
    ],
)
def test_which_token_is_none(body, param):
    """It is named by the key or place where it was sent."""
    assert refused(completion, **body).param == param


def test_integers_may_be_written_as_numbers():
    """To JSON Schema, and so to our own description of the routes, 2.0 is an integer. Some clients write no others."""
    parsed = completion(max_tokens=2.0, seed=-1e3)
    assert (parsed.sampling.max_tokens, parsed.sampling.seed) == (2, -1000)
    assert type(parsed.sampling.max_tokens) is int


UNSUPPORTED_CHAT = [
    ("functions", [{}]),
    ("modalities", ["text", "audio"]), ("audio", {"voice": "x"}),
    ("web_search_options", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED_CHAT)
def test_unsupported_chat_fields(name, value):
    """As for completions."""
    error = refused(chat, **{name: value})

    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("content", "text"),
    [("as before", "as before"), ("", ""), ([{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}], "a\nb")],
)
def test_predictions(content, text):
    """Parts follow each other as they are."""
    parsed = chat(prediction={"type": "content", "content": content})
    assert parsed.prediction == text
    assert parsed.messages_for_bus(["r"], "in-0", 0.0)[0].prediction == text
    assert chat(prediction=None).prediction is None
    assert chat(num_speculative_tokens=0).sampling.num_speculative_tokens == 0


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("text", "prediction"), ({}, "prediction.type"), ({"type": "tokens"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"), ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": "x", "tokens": 1}, "prediction.tokens"),
    ],
)  # fmt: skip
def test_bad_predictions(value, param):
    error = refused(chat, prediction=value)
    assert (error.status, error.param) == (400, param)
    assert refused(completion, prediction={"type": "content", "content": "x"}).param == "prediction"


@pytest.mark.parametrize("parse", [completion, chat])
def test_unknown_fields(parse):
    """What nobody knows is refused by name, not ignored."""
    error = refused(parse, temprature=1)

    assert (error.status, error.param, error.code) == (400, "temprature", "unknown_parameter")


def test_harmless_fields():
    """Fields that ask for nothing are accepted."""
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"}
    neutral = {"logprobs": False, "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "top_logprobs": 0,
               "response_format": {"type": "text"}, "modalities": ["text"], "echo": False}  # fmt: skip

    assert chat(**harmless, **neutral) == chat()
    assert completion(**harmless, best_of=1, echo=False, suffix="") == completion()


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("x", 1), ("", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2), (["a"] * 1024, 1024)],
)
def test_prompts(prompt, count):
    """A string, strings, token ids, lists of token ids."""
    parsed = completion(prompt=prompt)

    messages = parsed.messages_for_bus([str(i) for i in range(count)], "i", 0.0)
    assert len(messages) == count
    for message in messages:
        decoded = decode(encode(message))
        assert (decoded.prompt is not None) != bool(decoded.prompt_token_ids.size)


def test_token_ids_come_as_they_were_sent() -> None:
    """Zeros and ones among them."""
    for ids in ([0], [1, 0, 1], [99, 0, 98], list(range(100)) * 200):
        (prompt,) = completion(prompt=ids).prompts
        assert prompt.token_ids is not None
        assert (prompt.token_ids.dtype, prompt.token_ids.tolist()) == ("int32", ids)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"), ([], "prompt"), (5, "prompt"), ({}, "prompt"), ([[]], "prompt[0]"), (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"), ([True], "prompt[0]"), ([1.0], "prompt[0]"), ([1, 100], "prompt[1]"),
        ([-1], "prompt[0]"), ([2**40], "prompt[0]"), ([5, 2**31], "prompt[1]"), ([5, 2**32 + 5], "prompt[1]"),
        ([5, 0, False], "prompt[2]"), ([5, 1, 1.0], "prompt[2]"), ([5, 1, None], "prompt[2]"),
        ([[1], "a"], "prompt[1]"), ([[1], [100]], "prompt[1][0]"),
        (["a"] * 1025, "prompt"), ([None], "prompt[0]"),
    ],
)  # fmt: skip
def test_bad_prompts(prompt, param):
    """Anything else is a 400 that names the place."""
    error = refused(completion, prompt=prompt)

    assert (error.status, error.param) == (400, param)


def test_too_many_choices():
    """n times prompts is limited as a whole."""
    assert refused(completion, prompt=["a"] * 1024, n=5).param == "n"


def test_messages_are_normalised():
    """Text parts are joined; the nulls that a client sends back with an answer are dropped."""
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "audio": None, "annotations": []},
        {"role": "user", "content": "d", "name": "eve"},
    ]

    assert chat(messages=messages).prompts[0].messages == (
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d", "name": "eve"},
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"), ([], "messages"), ("hi", "messages"), (["hi"], "messages[0]"), ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"), ([USER, {"role": "king", "content": "x"}], "messages[1].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}], "messages[0].content[0].y"),
        ([{**USER, "tool_calls": [{}]}], "messages[0].tool_calls[0].function.name"),
        ([{**USER, "mood": "good"}], "messages[0].mood"),
        ([USER] * 4097, "messages"),
    ],
)  # fmt: skip
def test_bad_messages(messages, param):
    """Every part of a message is checked; the error says which message."""
    error = refused(chat, messages=messages)

    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "kwargs",
    [{"messages": []}, {"chat_template": "x"}, {"_x": 1}, {"a b": 1}, {"a": [[[[[1]]]]]}, {"a": list(range(300))},
     {f"k{i}": i for i in range(17)}, {"a": "x" * 2**16}, [1]],
)  # fmt: skip
def test_bad_template_kwargs(kwargs):
    """A template's variables are few, small, and none of those that the tokenizer sets."""
    assert refused(chat, chat_template_kwargs=kwargs).param.startswith("chat_template_kwargs")


def test_template_kwargs():
    """Plain values pass through."""
    assert chat(chat_template_kwargs={"enable_thinking": False}).chat_template_kwargs == {"enable_thinking": False}


def test_continue_final_message():
    """It needs add_generation_prompt to be off."""
    assert refused(chat, continue_final_message=True).param == "continue_final_message"
    assert chat(continue_final_message=True, add_generation_prompt=False).continue_final_message


def test_max_completion_tokens():
    """The new name wins over the old one."""
    assert chat(max_tokens=5).sampling.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).sampling.max_tokens == 6
    assert refused(chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert refused(completion, max_completion_tokens=6).code == "unknown_parameter"


def test_stream_options():
    """Only with stream, and only what is known."""
    assert completion(stream=True, stream_options={"include_usage": True}).stream_options == StreamOptions(usage=True)
    both = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    assert completion(stream=True, stream_options=both).stream_options == StreamOptions(True, True)
    assert refused(completion, stream=True, stream_options={"x": 1}).param == "stream_options.x"
    assert refused(completion, stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


def test_wrong_model():
    """404 as OpenAI's; a name as long as a book is cut."""
    error = refused(completion, model="gpt-4")
    assert (error.status, error.type, error.param, error.code) == (404, "NotFoundError", "model", "model_not_found")
    assert "gpt-4" in error.message
    assert len(refused(chat, model="x" * 10**6).message) < 300
    assert completion(model="alias").model == "alias"


def test_default_sampling():
    """The model's own defaults hold where the client says nothing."""
    model = ServedModel(names=("m",), default_sampling={"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.1})
    sampling = parse_completion({"prompt": "x", "top_k": 3}, model).sampling

    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.5, 3, 1.1)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}',
     b"[" * 5000 + b"]" * 5000],
)  # fmt: skip
def test_bad_json(body):
    """No JSON object, no service: also at any depth."""
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_priority_needs_a_server_that_knows_priorities():
    """As in vLLM: a 400 with first come, first served; else it reaches the bus. 0 is always taken."""
    body = {"prompt": "x", "priority": -7}
    error = refused(completion, priority=-7)
    assert (error.status, error.param) == (400, "priority")
    assert refused(chat, priority=1).param == "priority"
    assert completion(priority=0).priority == chat(priority=0).priority == 0
    (message,) = parse_completion(body, replace(MODEL, priorities=True)).messages_for_bus(["id"], "i", 0.0)
    assert decode(encode(message)).priority == -7


def test_a_cache_salt_reaches_the_bus():
    """On both routes."""
    for parsed in (completion(cache_salt="tenant"), chat(cache_salt="tenant")):
        (message,) = parsed.messages_for_bus(["id"], "i", 0.0)
        assert decode(encode(message)).cache_salt == "tenant"


def test_templates_of_clients():
    """A request's own chat template is refused, unless the server was started to take them."""
    error = refused(chat, chat_template="{{ messages }}")
    assert (error.status, error.param) == (400, "chat_template")
    trusting = replace(MODEL, request_templates=True)
    parsed = parse_chat({"messages": [USER], "chat_template": "{{ messages }}"}, trusting)
    (message,) = parsed.messages_for_bus(["r"], "i", 0.0)
    assert message.chat_template == "{{ messages }}"
