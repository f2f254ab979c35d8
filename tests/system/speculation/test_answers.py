"""Speculation through the whole system, over HTTP: answers are those without."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import pagebus.actors.shipped_model
from pagebus.actors.scheduler.replica.drafts.prices import Prices
from tests.helpers.waiting import eventually
from tests.system.serving import Client, serving

SHIPPED = Path(pagebus.actors.shipped_model.__file__).parent
DRAFTS = {"spec_method": "ngram", "spec_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
ITSELF = {"spec_method": "draft_model", "spec_tokens": 4, "spec_model": str(SHIPPED)}
LINE = "the quick brown fox jumps over the lazy dog; "
ASKED: list[dict[str, Any]] = [
    {"prompt": LINE * 3, "max_tokens": 60, "ignore_eos": True},
    {"prompt": LINE * 2, "max_tokens": 40, "temperature": 0.8, "seed": 3, "n": 2, "logprobs": 2, "ignore_eos": True},
    {"prompt": LINE * 3, "max_tokens": 60, "stop": ["fox", "e q"], "temperature": 0.5, "seed": 5},
    {
        "prompt": "a b a b a b a b",
        "max_tokens": 30,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "temperature": 0.7,
        "seed": 1,
    },
    {"prompt": LINE, "max_tokens": 30, "guided_regex": "(ab|cd){3,8}", "temperature": 1.0, "seed": 2},
    {"prompt": LINE, "max_tokens": 8, "use_beam_search": True, "n": 2, "best_of": 2},
]


def told(answer: dict[str, Any]) -> Any:
    """What does not depend on when it was asked."""
    scores = [choice["logprobs"] for choice in answer["choices"]]
    texts = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
    return texts, [score and score["tokens"] for score in scores], answer["usage"]["completion_tokens"]


async def answers(client: Client) -> list[Any]:
    return [told(each) for each in await asyncio.gather(*(client.completion(**asked) for asked in ASKED))]


async def drafts(client: Client, what: str) -> float:
    return await client.metric(lambda line: line.startswith(f"vllm:spec_decode_{what}_total"))


async def test_answers_are_those_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, ends, usage and tokens with log probabilities, of all kinds of requests beside each other. Whatever drafts
    cost here, they are planned."""
    monkeypatch.setattr(Prices, "done", lambda self, launched_s, done_s: self._in_flight.popleft())
    async with serving(SHIPPED, spec_method="none") as client:
        expected = await answers(client)
    async with serving(SHIPPED, **DRAFTS) as client:
        assert await answers(client) == expected
        again = await client.stream("completions", **ASKED[0], temperature=0)

        async def are_told() -> bool:
            names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
            rows, drafted, accepted, by_place = [await drafts(client, name) for name in names]
            return drafted >= rows > 0 and drafted >= accepted == by_place > 0

        await eventually(are_told)
    assert "".join(each["choices"][0]["text"] for each in again) == expected[0][0][0][0]
    async with serving(SHIPPED, **ITSELF) as client:
        assert await answers(client) == expected
