"""Adapters loaded, reloaded and unloaded at random under load, while actors are killed.

    python -m tests.system.lora.changes [--changes 10000] [--kills 40] [--json FILE]

Each name stands for one version after another, and for none in between. The tokens of an answer tell which version it
was computed with: it must be one that the name had while the request was sent. Prompts begin alike, so that a block of
one adapter that is found for another is a wrong answer. Nothing may be left at the end: no name, no block, no entry.
The exit code says whether all that holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.deployment import KINDS, Deployment, deployed
from tests.chaos.load import PAUSE_S, TRY_AGAIN
from tests.helpers.lora.adapters import greedy, make_adapter, merged
from tests.helpers.model_factory import make_model

BASE = "oracle"
"""The name of the model itself."""
NAMES_EACH, OPERATORS, CLIENTS = 2, 4, 12
VERSIONS = 10
PLACES = 3
TOKENS = 6
SHARED_TOKENS = 32
PATIENCE_S = 120.0
REST_S = 0.2
"""The most between two changes of an operator: few versions are possible then for most answers."""
TELL_S = 10.0
Reply = tuple[int, Any]


@dataclass(slots=True)
class Span:
    """A name stood for a version, or for None; at most from when the change was asked for until the next one was
    answered."""

    version: int | None
    began_s: float
    ended_s: float = math.inf


@dataclass(slots=True)
class Name:
    """What one name has stood for."""

    text: str
    spans: list[Span] = field(default_factory=lambda: [Span(None, 0.0)])

    def change(self, version: int | None) -> None:
        """It is asked for; until :meth:`changed` both may be."""
        self.spans.append(Span(version, time.monotonic()))

    def changed(self) -> None:
        self.spans[-2].ended_s = time.monotonic()
        self.spans = [span for span in self.spans if span.ended_s > time.monotonic() - PATIENCE_S]

    def versions(self, asked_s: float) -> set[int | None]:
        """All that it has stood for since then."""
        return {span.version for span in self.spans if span.ended_s >= asked_s}


@dataclass(slots=True)
class Oracle:
    """``folders`` of versions; ``answers`` by version (None: the model) and prompt, by transformers."""

    base: Path
    folders: Sequence[Path]
    prompts: Sequence[Sequence[int]]
    answers: Mapping[int | None, Sequence[Sequence[int]]]

    @classmethod
    def make(cls, folder: Path) -> Oracle:
        """A tiny model with adapters so wide that no two of them agree."""
        base = make_model(folder / "base", "llama2", seed=3)
        draw = random.Random(1)
        shared = [draw.randrange(300) for _ in range(SHARED_TOKENS)]
        prompts = [[*shared, *(draw.randrange(300) for _ in range(5))] for _ in range(3)]
        folders = [make_adapter(folder / f"v{each}", base, seed=each, rank=1 + each % 8) for each in range(VERSIONS)]
        answers = {None: greedy(merged(base, None), prompts, TOKENS)}
        answers |= {each: greedy(merged(base, path), prompts, TOKENS) for each, path in enumerate(folders)}
        for prompt in range(len(prompts)):
            assert len({tuple(each[prompt]) for each in answers.values()}) == len(answers), "two versions agree"
        return cls(base, folders, prompts, answers)


class Changes:
    """``count`` changes of names by operators, each of whom has names of their own, beside clients."""

    def __init__(self, deployment: Deployment, oracle: Oracle, count: int) -> None:
        self.deployment, self.oracle, self.count = deployment, oracle, count
        self.names = [Name(f"name-{each}") for each in range(NAMES_EACH * OPERATORS)]
        self.changes = 0
        self.answers: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.problems: list[str] = []
        self._over = asyncio.Event()

    async def run(self, kills: Sequence[str]) -> None:
        """All of it, with deaths of actors of these kinds spread over it, and the rest behind."""
        clients = [asyncio.create_task(self._client(each)) for each in range(CLIENTS)]
        helpers = [asyncio.create_task(each) for each in (self._kill(kills), self._tell())]
        try:
            await asyncio.gather(*(self._operator(each) for each in range(OPERATORS)))
            await helpers[0]
        finally:
            self._over.set()
            await asyncio.gather(*clients)
            await asyncio.gather(*helpers)
        async with aiohttp.ClientSession() as session:
            for name in self.names:
                await self._change(session, name, None)
        self.problems += [f"left over: {each}" for each in await self.deployment.until_at_rest()]

    # -- operators ----------------------------------------------------------------------------------------------------
    async def _operator(self, number: int) -> None:
        draw = random.Random(f"operator {number}")
        own = self.names[number * NAMES_EACH : (number + 1) * NAMES_EACH]
        async with aiohttp.ClientSession() as session:
            while self.changes < self.count and not self.problems:
                self.changes += 1
                unload = draw.random() < 0.3
                await self._change(session, draw.choice(own), None if unload else draw.randrange(VERSIONS))
                await asyncio.sleep(draw.random() * REST_S)

    async def _change(self, session: aiohttp.ClientSession, name: Name, version: int | None) -> None:
        """Until it is done: whether a try that broke off was done nobody knows."""
        body: dict[str, Any] = {"lora_name": name.text}
        path, done = "/v1/unload_lora_adapter", (200, 404)
        if version is not None:
            path, done = "/v1/load_lora_adapter", (200,)
            body |= {"lora_path": str(self.oracle.folders[version]), "load_inplace": True}
        name.change(version)
        _, (status, answer) = await self._ask(session, path, body)
        if status not in done:
            self.problems.append(f"{path} {body}: {status} {answer}")
        name.changed()

    # -- clients ------------------------------------------------------------------------------------------------------
    async def _client(self, number: int) -> None:
        draw = random.Random(f"client {number}")
        async with aiohttp.ClientSession() as session:
            while not self._over.is_set() and not self.problems:
                name = draw.choice([None, *self.names])
                prompt = draw.randrange(len(self.oracle.prompts))
                body = {
                    "model": BASE if name is None else name.text, "prompt": [*self.oracle.prompts[prompt]],
                    "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
                }  # fmt: skip
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        asked_s, reply = await self._ask(session, "/v1/completions", body)
                except TimeoutError:
                    self.problems.append(f"{body['model']}: hangs")
                else:
                    self._check(name, prompt, asked_s, reply)

    def _check(self, name: Name | None, prompt: int, asked_s: float, reply: Reply) -> None:
        """The answer is that of a version that the name had."""
        status, answer = reply
        versions = {None} if name is None else name.versions(asked_s)
        if name is not None and status == 404 and None in versions:
            self.answers["no such name"] += 1
            return
        tokens = answer["choices"][0]["token_ids"] if status == 200 else None
        for version in versions if name is None else versions - {None}:
            if tokens == self.oracle.answers[version][prompt]:
                self.answers["the model's" if name is None else "an adapter's"] += 1
                return
        of = [version for version, answers in self.oracle.answers.items() if answers[prompt] == tokens]
        self.problems.append(f"{name}: {versions} were possible; {status}, {answer}, which is of {of}")

    async def _ask(self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> tuple[float, Reply]:
        """When it was asked, and what was answered; again and again while nobody answers."""
        while True:
            asked_s = time.monotonic()
            try:
                async with session.post(f"{self.deployment.url}{path}", json=body) as response:
                    is_json = response.content_type == "application/json"
                    reply = response.status, await (response.json() if is_json else response.text())
                if response.status not in TRY_AGAIN:
                    return asked_s, reply
                self.answers["try again"] += 1
            except aiohttp.ClientError:
                self.answers["broken off"] += 1
            await asyncio.sleep(PAUSE_S)

    # -- beside -------------------------------------------------------------------------------------------------------
    async def _kill(self, kinds: Sequence[str]) -> None:
        """SIGKILL, one after another."""
        for number, kind in enumerate(kinds, 1):
            while self.changes < self.count * number // (len(kinds) + 1):
                if self.problems:
                    return
                await asyncio.sleep(PAUSE_S)
            self.deployment.kill(kind)
            self.kills[kind] += 1
            await asyncio.to_thread(self.deployment.until_healthy)

    async def _tell(self) -> None:
        """Progress, now and then."""
        while not self._over.is_set():
            print(f"{self.changes} changes, {sum(self.kills.values())} kills, {dict(self.answers)}", flush=True)
            try:
                async with asyncio.timeout(TELL_S):
                    await self._over.wait()
            except TimeoutError:
                continue


async def change_at_random(folder: Path, count: int, kills: Sequence[str]) -> Changes:
    """Run all of it in ``folder``; ``problems`` of what comes back are what was wrong."""
    oracle = Oracle.make(folder)
    options = ["--skip-tokenizer-init", "--enable-lora", "--max-loras", f"{PLACES}", "--max-cpu-loras", f"{PLACES + 1}"]
    with deployed(folder, *options, model=oracle.base) as deployment:
        changes = Changes(deployment, oracle, count)
        await changes.run(kills)
        if deployment.stop() != 0:
            changes.problems.append(deployment.log())
    return changes


def main() -> int:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kinds = [KINDS[each % len(KINDS)] for each in range(arguments.kills)]
        done = asyncio.run(change_at_random(Path(folder), arguments.changes, kinds))
    figures = {
        "changes": done.changes, "kills": dict(done.kills), "answers": dict(done.answers),
        "seconds": round(time.monotonic() - began_s), "problems": done.problems[:10],
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 1 if done.problems else 0


if __name__ == "__main__":
    sys.exit(main())
