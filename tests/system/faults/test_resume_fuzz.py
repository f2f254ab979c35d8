"""Streams cut at any byte and taken up again, with the last event's id or with something that is none.

``PAGEBUS_TEST_FUZZ=20000 python -m pytest tests/system/faults/test_resume_fuzz.py`` breaks a twentieth as many.
"""

from __future__ import annotations

import asyncio
import json
import os
import random

import aiohttp
import pytest

from tests.helpers.oracle import make_oracle
from tests.helpers.waiting import TEST_LIMIT_S, eventually
from tests.system.serving import serving

COUNT = int(os.environ.get("PAGEBUS_TEST_FUZZ", "1000")) // 20
SEED = int(os.environ.get("PAGEBUS_TEST_FUZZ_SEED", "0"))
WORKERS = 8
FALSE_IDS = (
    "",
    "1",
    "1.1",
    "0.0",
    "999999999.999999999",
    "-1.0",
    "1.1,1.1",
    "1.1.,",
    "9" * 400,
    "x",
    "1.1\u00e9",
    "0.0.",
)


async def read(response: aiohttp.ClientResponse, cut_after: float) -> tuple[list[int], str | None, bool]:
    """Token ids, the last event's id and whether the end came, reading at most so many bytes."""
    tokens: list[int] = []
    last, done, pending, taken = None, False, b"", 0
    new: list[int] = []
    while taken < cut_after and (data := await response.content.readany()):
        taken += len(data)
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if line.startswith(b"id: "):
                last = line[4:].decode()
                tokens, new = tokens + new, []
            elif line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    new += choice.get("token_ids") or []
    return (tokens + new if done else tokens), last, done


@pytest.mark.timeout(TEST_LIMIT_S + COUNT)
async def test_streams_cut_anywhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With true ids every answer is complete and nothing comes twice; false ones are a 400 or a stream with its end."""
    folder = make_oracle(tmp_path_factory.mktemp("model"))
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    async with serving(folder, load_format="dummy", max_model_len=64) as client, aiohttp.ClientSession() as session:

        async def ask(prompt: list[int], key: str, last: str | None, cut: float) -> tuple[list[int], str | None, bool]:
            headers = {"Idempotency-Key": key} | ({} if last is None else {"Last-Event-ID": last})
            url, sent = f"{client.url}/v1/completions", {**body, "prompt": prompt}
            async with session.post(url, json=sent, headers=headers) as response:
                assert response.status in (200, 400), response.status
                if response.status == 400:
                    assert (await response.json())["error"]["param"] == "Last-Event-ID"
                    return [], None, True
                answer = await read(response, cut)
                if not answer[2]:
                    response.close()
                return answer

        async def one(number: int) -> None:
            rng = random.Random(f"{SEED}-{number}")
            prompt = [rng.randrange(300) for _ in range(4)]
            expected, _, _ = await ask(prompt, f"whole-{number}", None, float("inf"))
            assert len(expected) == 12
            if rng.random() < 0.3:
                await ask(prompt, f"false-{number}", rng.choice(FALSE_IDS), float("inf"))
                return
            tokens: list[int] = []
            last, done = None, False
            while not done:
                more, heard, done = await ask(prompt, f"cut-{number}", last, rng.randrange(1, 2500))
                tokens, last = tokens + more, heard or last
            assert tokens == expected, f"stream {number} of seed {SEED}"

        numbers = iter(range(COUNT))

        async def work() -> None:
            for number in numbers:
                await one(number)
                client.check()

        await asyncio.gather(*(work() for _ in range(WORKERS)))
        scheduler = client.actors["scheduler"]

        async def clean() -> bool:
            return not scheduler.core.requests and not any(scheduler.core.leftovers().values())  # type: ignore[attr-defined]

        await eventually(clean)
