"""What is refused for the length of its prompts or of its answer, before anything is tokenized."""

from __future__ import annotations

import pytest

from pagebus.web.http.errors import ApiError
from pagebus.web.requests.lengths import CHARS_PER_TOKEN, MOST_REPEATED, check_length, check_repeats
from pagebus.web.requests.openai import parse_chat, parse_completion
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.served_model import ServedModel

MODEL = ServedModel(names=("m",), vocab_size=100, max_model_len=1 << 17)
LONG = [7] * (MOST_REPEATED // (64 * 21) + 1)
"""A prompt of which 64 choices with 20 alternatives a token are too many."""


def completion(**body: object) -> ParsedRequest:
    return parse_completion({"max_tokens": 1, "logprobs": None, **body}, MODEL)


def test_a_text_of_too_many_characters() -> None:
    check_length(completion(prompt="x" * 10), MODEL, 10)
    with pytest.raises(ApiError, match="maximum context length") as caught:
        check_length(completion(prompt="x" * 11), MODEL, 10)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG, "prompt_logprobs": 20},
        {"prompt": [LONG[: len(LONG) // 2]] * 3, "prompt_logprobs": 20},
        {"prompt": LONG, "echo": True, "logprobs": 20},
        {"prompt": "x" * (CHARS_PER_TOKEN * len(LONG)), "prompt_logprobs": 20},
    ],
    ids=["ids", "prompts", "echo", "text"],
)
def test_choices_that_repeat_too_many_log_probabilities(body: dict[str, object]) -> None:
    with pytest.raises(ApiError, match="repeats the log probabilities") as caught:
        check_repeats(completion(n=64, **body))
    assert caught.value.param == "n"
    check_repeats(completion(n=1, **body))
    check_repeats(completion(n=64, prompt=LONG[1:]))


def test_choices_of_a_chat() -> None:
    chat = {"messages": [{"role": "user", "content": "x" * CHARS_PER_TOKEN * len(LONG)}], "prompt_logprobs": 20}
    check_repeats(parse_chat(chat, MODEL))
    with pytest.raises(ApiError, match="repeats the log probabilities"):
        check_repeats(parse_chat({**chat, "n": 64}, MODEL))
