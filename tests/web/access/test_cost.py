"""What a call counts for before its texts are tokenized."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagebus.actors.model.pooling.pooler import Pooler
from pagebus.web.access.admission import cost_of
from pagebus.web.http.limits import MESSAGE_TOKENS, UNSTATED_OUTPUT_TOKENS
from pagebus.web.pooling.scores import parse_score
from pagebus.web.requests.openai import parse_chat, parse_completion
from pagebus.web.requests.served_model import ServedModel

LARGE = ServedModel(names=("m",), vocab_size=1000, max_model_len=100_000)


def asked(**fields):
    return parse_completion({"prompt": "x", **fields}, LARGE)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": "a" * 400, "max_tokens": 10}, 110),
        ({"prompt": "é" * 400, "max_tokens": 10}, 210),
        ({"prompt": [1] * 50, "max_tokens": 10}, 60),
        ({"prompt": [[1] * 50, [1] * 30], "max_tokens": 10, "n": 3}, 3 * (60 + 40)),
        ({"prompt": "a" * 1_600_000, "max_tokens": 10}, 100_000),
        ({"prompt": ["a" * 3_200_000, "a"], "max_tokens": 10}, 200_000 + 11),
    ],
)
def test_cost_of_completions(fields, tokens):
    """n x (prompt + max_tokens); text has a token for four bytes; nothing is longer than the context, but
    what is far longer counts by its size."""
    assert cost_of(asked(**fields), LARGE) == tokens


def test_cost_of_chats():
    """Messages count with what a template puts round them; who does not say how long the answer may be is charged."""
    chat = parse_chat({"messages": [{"role": "user", "content": "a" * 40}] * 2}, LARGE)

    assert cost_of(chat, LARGE) == 2 * (10 + MESSAGE_TOKENS) + UNSTATED_OUTPUT_TOKENS


def test_cost_of_what_a_template_is_given():
    """Tools and documents, which it writes into the prompt."""
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
    plain = cost_of(parse_chat(chat, LARGE), LARGE)

    assert cost_of(parse_chat(chat | {"documents": [{"text": "a" * 400}]}, LARGE), LARGE) > plain + 100


def test_cost_of_a_pair():
    """Both texts count."""
    model = replace(LARGE, pooler=Pooler("cls", labels=("LABEL_0",), joined=False))

    pair = parse_score({"text_1": "a" * 40, "text_2": "b" * 400}, model)

    assert cost_of(pair, model) == 10 + 100 + 1


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [({"min_tokens": 5000}, 5000 + 5), ({"ignore_eos": True}, 100_000), ({"max_tokens": 7, "ignore_eos": True}, 7 + 5),
     ({"max_tokens": 7, "use_beam_search": True, "n": 4}, 4 * (7 + 5))],
)  # fmt: skip
def test_cost_of_what_does_not_end_by_itself(fields, tokens):
    """Who wants a long answer is charged for one, and beams are charged one by one."""
    chat = parse_chat({"messages": [{"role": "user", "content": "a"}], **fields}, LARGE)

    assert cost_of(chat, LARGE) == tokens


def test_beams_beyond_the_choices_count():
    """What is computed counts, not what is shown."""
    call = parse_completion({"prompt": "x", "max_tokens": 9, "use_beam_search": True, "best_of": 8}, LARGE)

    assert cost_of(call, LARGE) == 8 * 10
    assert cost_of(asked(max_tokens=9, best_of=8), LARGE) == 8 * 10
    unknown = ServedModel(names=("m",), vocab_size=1000, max_model_len=None)
    endless = parse_chat({"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}, unknown)
    assert cost_of(endless, unknown) == UNSTATED_OUTPUT_TOKENS + 5
