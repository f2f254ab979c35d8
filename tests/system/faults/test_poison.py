"""A message that makes an actor fail: kept aside with its error, a clear 500 for its client, nothing for the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from pagebus.actors.commands.cli import main
from pagebus.actors.scheduler.request import MOST_LOSSES
from pagebus.bus.contract import Bus
from pagebus.bus.dead_letters import read_dead_letters
from pagebus.bus.messages import StepPlan
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference
from tests.helpers.waiting import eventually
from tests.system.harness import running
from tests.system.serving import Client, serving

POISON = "poison"
PROMPTS = [[1, 2, 3, number] for number in range(20, 26)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[0])


def fragile(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with a bug: it raises for every message that speaks of the poisonous request."""

    def fails(message: Any) -> Any:
        each = message if isinstance(message, list) else [message]
        ids = [getattr(one, "request_id", "") or " ".join(getattr(one, "request_ids", ())) for one in each]
        if any(POISON in name for name in ids):
            raise RuntimeError("a bug")
        return method(message)

    return fails


def part_of(client: Client, stage: str) -> tuple[Any, str]:
    """What takes messages there: an object and the name of its method."""
    actor: Any = client.actors[stage]
    return {
        "tokenizer": lambda: (actor._encoder, "encode"),
        "scheduler": lambda: (actor.core, "handle"),
        "detokenizer": lambda: (actor._sequences, "start"),
        "ingress": lambda: (actor.context.inbox, "deliver"),
    }[stage]()


async def dead_letters(names: Names, url: str, *arguments: str) -> int:
    """The command, as it is typed."""
    return await asyncio.to_thread(main, ["dead-letters", *arguments, "--bus", url, "--name", names.deployment])


@pytest.mark.parametrize("stage", ["tokenizer", "scheduler", "detokenizer", "ingress"])
async def test_poison(folder, redis_url, redis_names, capsys, monkeypatch, stage):
    """In every stage; once what failed is mended, work can be done again, and the rest be dropped."""

    def open_bus(_: str) -> Bus:
        return RedisBus(redis_url, redis_names)

    async with serving(folder, open_bus=open_bus, name=redis_names.deployment) as client:
        body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        good = [(await client.post("completions", prompt=prompt, **body))["choices"] for prompt in PROMPTS]
        target, method = part_of(client, stage)
        original = getattr(target, method)
        monkeypatch.setattr(target, method, fragile(original))

        others = [client.post("completions", prompt=prompt, **body) for prompt in PROMPTS]
        if stage == "ingress":  # there a message speaks of several requests
            answers = await asyncio.gather(*others)
            status, answer = await client.status("completions", POISON, prompt=[7, 7, 7], **body)
        else:
            poisoned = client.status("completions", POISON, prompt=[7, 7, 7], **body)
            (status, answer), *answers = await asyncio.gather(poisoned, *others)

        assert [each["choices"] for each in answers] == good
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        assert "a bug" not in answer["error"]["message"]
        bus = client.actors["ingress"].bus

        async def kept() -> bool:
            return bool(await read_dead_letters(bus, redis_names, stage))

        await eventually(kept)
        setattr(target, method, original)
        capsys.readouterr()
        assert await dead_letters(redis_names, redis_url, "list", "--json") == 0
        letter, *_ = json.loads(capsys.readouterr().out)
        assert letter["letter"].startswith(f"{stage}/")
        assert letter["reason"] == "RuntimeError: a bug"

        again = await dead_letters(redis_names, redis_url, "requeue", letter["letter"])
        assert again == (0 if stage in ("tokenizer", "scheduler") else 1)
        assert await dead_letters(redis_names, redis_url, "drop", "--all") == 0
        assert await read_dead_letters(bus, redis_names, stage) == []
        assert (await client.post("completions", prompt=PROMPTS[0], **body))["choices"] == good[0]


async def test_poison_of_executors(folder, redis_bus_factory, monkeypatch):
    """A request that ends every executor that takes it is given up after a few; those beside it are answered."""
    from pagebus.actors.executor.engine import Engine

    submit, bad_token = Engine.submit, 299

    def fails(self: Engine, plan: StepPlan, epoch: int) -> None:
        if bad_token in plan.new_token_ids:
            raise RuntimeError("a bug")
        submit(self, plan, epoch)

    monkeypatch.setattr(Engine, "submit", fails)
    async with running(folder, redis_bus_factory, lease_ttl_s=1.0) as system:
        good = [system.submit(prompt, max_tokens=8)[1] for prompt in PROMPTS]
        name, _ = system.submit([7, bad_token], max_tokens=8)
        lives = 0
        while not await system.failures():
            lives += await system.restart_failed_executors()
            await asyncio.sleep(0.02)

        answers = asyncio.gather(*good)
        while not answers.done():  # the last one to fail may not have been restarted above
            await system.restart_failed_executors()
            await asyncio.sleep(0.02)
        assert [len(tokens) for tokens in await answers] == [8] * len(PROMPTS)
        assert [(failure.request_id, failure.status) for failure in await system.failures()] == [(name, 500)]
        assert 1 < lives <= MOST_LOSSES + 1

        async def kept() -> bool:
            letters = await read_dead_letters(system.bus, system.names, "scheduler")
            return [letter.request_id for letter in letters] == [name]

        await eventually(kept)
        await system.bus.delete(system.names.dead_letters("scheduler"))
