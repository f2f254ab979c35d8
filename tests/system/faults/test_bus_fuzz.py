"""Entries that nobody should write, on the streams that many write to, beside good requests.

``PAGEBUS_TEST_FUZZ=20000 python -m pytest tests/system/faults/test_bus_fuzz.py`` writes a tenth as many. A failure
names the seed and the number, from which :func:`make_entry` makes the entry again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from pagebus.bus.codec import HEADER, encode
from pagebus.bus.contract import Bus
from pagebus.bus.dead_letters import read_dead_letters
from pagebus.bus.messages import (
    AbortRequest,
    GenerateRequest,
    Message,
    PromptReply,
    ReplyBatch,
    RequestFailed,
    RequestsDone,
    SamplingParams,
    StopSequence,
    TokenizedRequest,
)
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference
from tests.helpers.waiting import TEST_LIMIT_S, eventually
from tests.system.serving import Client, serving

COUNT = int(os.environ.get("PAGEBUS_TEST_FUZZ", "1500")) // 10
SEED = int(os.environ.get("PAGEBUS_TEST_FUZZ_SEED", "0"))
BATCH = 50
BODY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPTS = [[1, 2, 3, number] for number in range(20, 24)]
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, -(2**31), 2**63, 2**70, 1e308, -0.5, 0.5, "", "x" * 10_000, "\ud800", "\0", [], [[]],
    [None],
    [2**40], ["x"], {}, {"": {}}, {"9": 1e9}, [-1], {"-1": "x"}, [0] * 3000, ["a"] * 300,
)  # fmt: skip


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def valid(name: str) -> dict[str, list[Message]]:
    """Messages that belong on each stream, all of one request that nobody waits for."""
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    generate = GenerateRequest(request_id=name, ingress="fuzz", sampling=sampling, prompt_token_ids=ints(1, 2, 3))
    tokenized = TokenizedRequest(
        request_id=name, ingress="fuzz", sampling=replace(sampling, n=2), prompt_token_ids=ints(1, 2, 3)
    )
    reply = ReplyBatch(
        request_ids=(name,), texts=("x",), finish_reasons=("stop",), stop_reasons=(None,), choice_indexes=ints(0),
        num_output_tokens=ints(1), num_prompt_tokens=ints(3), num_cached_tokens=ints(0), text_offsets=ints(0),
    )  # fmt: skip
    return {
        "requests": [generate, replace(generate, prompt="x", prompt_token_ids=ints()),
                     replace(generate, messages=({"role": "user", "content": "x"},), prompt_token_ids=ints())],
        "tokenized": [tokenized],
        "control": [AbortRequest(request_id=name), RequestsDone(request_ids=(name,), attempts=("",)),
                    StopSequence(request_id=name, sequence_id=1)],
        "replies": [reply, PromptReply(request_id=name, text="x"),
                    RequestFailed(request_id=name, status=400, error_type="x", message="x")],
        "jobs": [],
    }  # fmt: skip


def make_entry(seed: int, number: int) -> tuple[str, dict[bytes, bytes]]:
    """A stream (of :func:`valid`) and the fields of an entry."""
    rng = random.Random(f"{seed}-{number}")
    messages = valid(f"fuzz-{seed}-{number}")
    stream = rng.choice(list(messages))
    if stream == "jobs":
        return stream, _job(rng)
    source = stream if rng.random() < 0.8 else rng.choice([name for name, each in messages.items() if each])
    frame = dict(encode(rng.choice(messages[source])))
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        _mutate(rng, frame)
    return stream, frame or {b"x": b"y"}


def _mutate(rng: random.Random, frame: dict[bytes, bytes]) -> None:
    match rng.randrange(6):
        case 0 | 1 | 2 if HEADER in frame:
            try:
                frame[HEADER] = _mutated_json(rng, frame[HEADER])
            except ValueError:  # no JSON any more
                frame[HEADER] += b"}"
        case 3:
            frame[rng.choice([b"prompt_token_ids", b"choice_indexes", b"zz", b"block_hashes"])] = rng.choice(
                [b"", b"\0" * 3, rng.randbytes(8), np.array([2**31 - 1, -5], np.int32).tobytes(), b"\0" * 40_000]
            )
        case 4 if frame:
            key = rng.choice(list(frame))
            frame[key] = frame[key][: rng.randrange(len(frame[key]) + 1)]
        case _ if frame:
            del frame[rng.choice(list(frame))]


def _mutated_json(rng: random.Random, raw: bytes) -> bytes:
    header = json.loads(raw)
    at = header
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.7:
            at = at[key]
            continue
        if key not in ("request_id", "ingress"):  # which would be somebody else's
            at[key] = rng.choice(ODD)
        break
    return json.dumps(header).encode("utf-8", "surrogatepass")


def _job(rng: random.Random) -> dict[bytes, bytes]:
    body: Any = {"prompt": [1, 2], "max_tokens": 2}
    if rng.random() < 0.6:
        body[rng.choice(["prompt", "max_tokens", "stream", "n", "x"])] = rng.choice(ODD)
    line: Any = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    if rng.random() < 0.5:
        line[rng.choice(list(line))] = rng.choice(ODD)
    fields = {b"request": json.dumps(line).encode("utf-8", "surrogatepass")}
    if rng.random() < 0.5:
        odd = [b"", b"\xff", b"9" * 400, b"-1", b"fuzz-results", b"x\n\x1b[31m"]
        fields[rng.choice([b"reply_to", b"priority", b"batch", b"request", b"zz"])] = rng.choice(odd)
    return fields


async def good_requests(client: Client, expected: list[Any], done: asyncio.Event) -> int:
    """How many answers came, all of them right."""
    count = 0
    while not done.is_set():
        answers = await asyncio.gather(*(client.post("completions", prompt=prompt, **BODY) for prompt in PROMPTS))
        assert [each["choices"] for each in answers] == expected
        count += len(answers)
    return count


@pytest.mark.timeout(TEST_LIMIT_S + COUNT)
async def test_entries_gone_wrong(redis_url: str, redis_names: Names, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No actor ends, good answers stay right, nothing is left over; what cannot be read is kept with the reason."""
    folder = make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[0])

    def open_bus(_: str) -> Bus:
        return RedisBus(redis_url, redis_names)

    async with (
        serving(folder, open_bus=open_bus, name=redis_names.deployment, max_model_len=256) as client,
        Redis.from_url(redis_url) as redis,
        asyncio.TaskGroup() as group,
    ):
        expected = [(await client.post("completions", prompt=prompt, **BODY))["choices"] for prompt in PROMPTS]
        ingress: Any = client.actors["ingress"]
        keys = {"requests": redis_names.requests, "tokenized": redis_names.tokenized, "control": redis_names.control,
                "replies": redis_names.replies(ingress.context.address), "jobs": redis_names.jobs}  # fmt: skip
        done = asyncio.Event()
        good = group.create_task(good_requests(client, expected, done))
        for number in range(COUNT):
            stream, fields = make_entry(SEED, number)
            await redis.xadd(keys[stream], fields)
            if number % BATCH == BATCH - 1:

                async def taken() -> bool:
                    client.check()
                    return not sum([await redis.xlen(keys[name]) for name in ("requests", "replies", "jobs")])

                await eventually(taken)
        done.set()
        assert await good > 0
        client.check()
        letters = [len(await read_dead_letters(ingress.bus, redis_names, stage)) for stage in client.actors]
        assert sum(letters) > COUNT // 20
        scheduler: Any = client.actors["scheduler"]

        async def idle() -> bool:
            client.check()
            return scheduler.core.num_running == 0 and not len(scheduler.core.waiting)

        await eventually(idle)
        scheduler.core.check_integrity()


def test_entries_can_be_made_again() -> None:
    """The same seed and number give the same entry."""
    for number in range(50):
        assert make_entry(3, number) == make_entry(3, number)
