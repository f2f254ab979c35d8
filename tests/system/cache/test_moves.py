"""Blocks that move between two executors over a real Redis: what one has computed, the other need not compute again,
and the tokens are the very same."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pagebus.actors.shipped_model
from pagebus.actors.executor.moves import own_cache
from pagebus.actors.executor.moves.carriers.shared_file import SharedFile
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.kv.read_rate import ReadRate
from pagebus.actors.scheduler.request import Sequence
from pagebus.bus.messages import AbortRequest
from pagebus.bus.streams import Names
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate
from tests.helpers.waiting import eventually, until
from tests.system.curtain import Curtain
from tests.system.harness import System, running
from tests.system.serving import Client, serving

pytestmark = pytest.mark.share(4)

SHIPPED = Path(pagebus.actors.shipped_model.__file__).parent
CONFIG = replace(REFERENCE_CONFIGS[0], overrides=REFERENCE_CONFIGS[0].overrides | {"max_position_embeddings": 8192})
BLOCK, COUNT, SLOTS = 16, 8, 2
FIRST, SECOND = "executor-0", "executor-1"
WAYS = ("host", "network", "off")


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A value of ``--kv-moves``. With ``network`` executors take each other's host for another one. Pulls pay, however
    busy the machine is."""
    monkeypatch.setattr(ReadRate, "tokens", lambda *_: None)
    if request.param == "network":
        monkeypatch.setattr(own_cache, "host_id", lambda: "elsewhere")
        monkeypatch.delattr(SharedFile, "copy")
    return str(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("moves") / "model", CONFIG)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(CONFIG.vocab_size) for _ in range(length)]


# -- a prefix that another executor has --------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def full_and_free(
    model: Path, open_bus: Callable[[set[str]], Curtain], prefixes: list[list[int]], **options: Any
) -> AsyncIterator[System]:
    """Two executors. The first has computed the prefixes, and has no slot free; the second has just joined."""
    hidden = {SECOND}
    async with running(model, lambda: open_bus(hidden), executors=1, max_num_seqs=SLOTS, **options) as system:
        system.num_executors = 2
        await system.add_executor(SECOND)
        for prefix in prefixes:
            await system.generate([prefix], max_tokens=1)
        core = system.scheduler.core
        long = [system.submit([number], temperature=1.0, max_tokens=8000)[0] for number in range(SLOTS)]
        await until(lambda: core.num_running == SLOTS)
        hidden.clear()
        await until(lambda: SECOND in core.replicas)
        yield system
        aborts = [(system.names.control, AbortRequest(request_id=each)) for each in long]
        await system.bus.publish(aborts)


@pytest.mark.parametrize("way", WAYS, indirect=True)
async def test_a_prefix_is_pulled_from_who_is_full(model: Path, redis_url: str, redis_names: Names, way: str) -> None:
    """All whole blocks of the prefix are, and count as cached. Without moves all is computed."""
    rng = random.Random(1)
    prefixes = [prompt(rng, length) for length in (250, 160, 47)]
    asked = [[*prefix, *prompt(rng, 5)] for prefix in prefixes]
    expected = reference_generate(model, asked, COUNT)
    options: dict[str, Any] = {"name": redis_names.deployment, "kv_moves": way}
    async with full_and_free(model, partial(Curtain, redis_url, names=redis_names), prefixes, **options) as system:
        core, collector = system.scheduler.core, system.collector
        for each, tokens in zip(asked, expected, strict=True):
            request_id, answer = system.submit(each, max_tokens=COUNT)
            assert await answer == tokens
            assert {stream for _, stream in collector.came[request_id]} == {system.names.results(SECOND)}
            assert collector.cached[request_id] == (0 if way == "off" else (len(each) - 5) // BLOCK * BLOCK)
        moved = core.replicas[SECOND].moves
        blocks = 0 if way == "off" else sum(len(prefix) // BLOCK for prefix in prefixes)
        assert (moved.num_pulled, moved.num_pulled_tokens) == (blocks, blocks * BLOCK)
        assert (moved.num_failed, core.replicas[FIRST].moves.num_lent) == (0, blocks)


# -- a prefix in another executor's host tier --------------------------------------------------------------------------
def only(core: Core, name: str) -> None:
    """No other replica takes sequences from now on."""
    for replica in core.replicas.values():
        replica.is_open = partial(type(replica).is_open if replica.name == name else closed, replica)  # type: ignore
    core.planner.touch_all()


def closed(*_: object) -> bool:
    return False


@pytest.mark.parametrize("way", WAYS, indirect=True)
async def test_a_prefix_is_pulled_out_of_a_host_tier(model: Path, redis_url: str, redis_names: Names, way: str) -> None:
    """The first executor's device has given it away; the second takes it out of the first one's host memory, keeps no
    copy in its own when it gives it away, too, and takes it again."""
    rng = random.Random(2)
    prefixes = [prompt(rng, length) for length in (250, 160, 40)]
    asked = [[*prefix, *prompt(rng, 5)] for prefix in prefixes]
    expected = reference_generate(model, asked, COUNT)
    options: dict[str, Any] = {"name": redis_names.deployment, "kv_moves": way, "executors": 2, "swap_space": 0.05}
    options |= {"num_gpu_blocks_override": 64, "max_model_len": 1000, "preemption_mode": "swap"}
    wanted = sum(len(prefix) // BLOCK for prefix in prefixes)
    async with running(model, partial(Curtain, redis_url, set(), redis_names), **options) as system:
        core, collector = system.scheduler.core, system.collector
        first, second = core.replicas[FIRST], core.replicas[SECOND]

        async def displace(name: str) -> None:
            only(core, name)
            await system.generate([prompt(rng, 300) for _ in range(8)], max_tokens=1)

        only(core, FIRST)
        await system.generate(prefixes, max_tokens=1)
        await displace(FIRST)
        kept = set(first.host_tier.pool.index.blocks) - set(first.index.blocks)
        assert len(kept) >= wanted
        for turn in (1, 2):
            only(core, SECOND)
            for each, tokens in zip(asked, expected, strict=True):
                request_id, answer = system.submit(each, max_tokens=COUNT)
                assert await answer == tokens
                hit = (len(each) - 5) // BLOCK * BLOCK
                assert collector.cached[request_id] == (hit if way != "off" or turn == 2 else 0)
            pulled = 0 if way == "off" else turn * wanted
            assert (second.moves.num_pulled, second.moves.num_pulled_hosts, second.moves.num_failed) == (
                pulled,
                pulled,
                0,
            )
            assert first.moves.num_lent == pulled
            await displace(SECOND)
            held = kept & set(second.host_tier.pool.index.blocks)
            assert len(held) == (0 if way != "off" else wanted)


# -- an executor that drains -------------------------------------------------------------------------------------------
STORY = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 150, "maxLength": 160}, "legs": {"type": "integer"}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {"prompt": "a dog is " * 8, "temperature": 0, "logprobs": 2, **LONG}),
    "seeded": ("completions", {"prompt": "what is a fish? " * 4, "seed": 5, "n": 3, **LONG}),
    "beams": ("completions", {"prompt": "the quick brown fox " * 4, "use_beam_search": True, "n": 3, **LONG}),
    "grammar": ("chat/completions", {
        "messages": [{"role": "user", "content": "What is a dog?"}], "seed": 2, "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"name": "story", "schema": STORY, "strict": True}},
    }),
}  # fmt: skip
NUM_HEADS = 1 + 3 + 1 + 1
EARLY = 16
"""Tokens that each sequence has when its executor drains."""


async def answers(client: Client) -> dict[str, Any]:
    """What all requests, asked at once, are answered."""
    posted = [client.post(path, **body) for path, body in ASKED.values()]
    found = await asyncio.gather(*posted)
    return dict(zip(ASKED, found, strict=True))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The answers of one executor."""

    async def ask() -> dict[str, Any]:
        async with serving(SHIPPED) as client:
            return await answers(client)

    return asyncio.run(ask())


def told(answer: dict[str, Any]) -> list[Any]:
    """What has to be the same of an answer."""
    names = ("index", "text", "message", "token_ids", "finish_reason")
    return [{name: choice.get(name) for name in names} for choice in answer["choices"]]


@pytest.mark.parametrize("way", WAYS[:2], indirect=True)
async def test_a_drain_in_mid_sequence(redis_url: str, redis_names: Names, way: str, alone: dict[str, Any]) -> None:
    """Greedy and sampled choices, beams and a grammar's text go on elsewhere with the same tokens."""
    hidden, nothing = {FIRST, SECOND}, set[str]()
    options: dict[str, Any] = {"name": redis_names.deployment, "kv_moves": way, "executors": 2, "job_actors": 0}

    def open_bus(kind: str) -> Curtain:
        return Curtain(redis_url, hidden if kind == "scheduler" else nothing, redis_names)

    async with serving(SHIPPED, open_bus=open_bus, **options) as client:
        core = client.actors["scheduler"].core
        asking = asyncio.create_task(answers(client))
        await until(lambda: len(core.requests) == len(ASKED))
        hidden.remove(FIRST)
        await until(lambda: len(heads(core)) == NUM_HEADS)
        hidden.clear()
        await until(lambda: SECOND in core.replicas and all(num_output(each) >= EARLY for each in heads(core)))
        assert len(heads(core)) == NUM_HEADS
        client.executors[FIRST].request_drain()
        got = await asking
        await eventually(lambda: client.metric(lambda line: line.startswith("pagebus:pulled_blocks_total")))
        moved = core.replicas[SECOND].moves
        await until(lambda: all(each.pool.num_free == each.pool.num_blocks for each in core.replicas.values()))
        core.check_integrity()

    assert {name: told(answer) for name, answer in got.items()} == {name: told(each) for name, each in alone.items()}
    assert moved.num_pulled > 0
    assert moved.num_failed == 0


def heads(core: Core) -> list[Sequence]:
    """Sequences in slots, one of each beam search."""
    return [each for replica in core.replicas.values() for each in replica.slots.occupied() if each is each.head]


def num_output(sequence: Sequence) -> int:
    return len(sequence.tokens) - len(sequence.request.prompt)
