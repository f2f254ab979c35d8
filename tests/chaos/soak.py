"""Half an hour at 80% of what a deployment can do, with aborts, faults and chats: leaks show from rest to rest.

    python -m tests.chaos.soak [--minutes 30] [--json FILE]

Clients arrive at random times; a fifth of them leaves at a random moment. Every half minute something breaks: in the
first third also what kills processes, later only what they must outlive, so that their memory can be compared. Six
times the load rests until nothing may be left. At the first rest after the first third and at the last one, memory of
every actor, of Redis and open files must be the same, within 5%. The exit code says whether all that holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import psutil

from tests.chaos.deployment import KINDS, Deployment, deployed
from tests.chaos.load import Job, Load, WrongAnswer, difference, make_jobs
from tests.chaos.structured import structured

SLOTS = 16
STEP_MS = 50
LOAD = 0.8
"""Of what saturated clients get."""
CALIBRATION_S = 30.0
FAULT_EVERY_S = 30.0
RESTS = 6
LEAVE = 0.2
"""Share of clients that leave before they have everything."""
PATIENCE_S = 120.0
MOST_GROWTH = 0.05
CHATS, TURNS = 12, 4


@dataclass(frozen=True, slots=True)
class Sample:
    """A deployment at rest. Memory in MiB by process; ``files`` are open descriptors."""

    minute: float
    memory: Mapping[str, float]
    files: Mapping[str, int]
    redis_used: float
    keys: int


@dataclass(slots=True)
class Soak:
    """What happens, and what has been seen of it."""

    deployment: Deployment
    load: Load
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    answers: int = 0
    left: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def run(self, minutes: float) -> None:
        """Everything, in order."""
        await self.load.learn()
        await self.learn_chats()
        rate = LOAD * await self.saturated_rate()
        print(f"{len(self.load.jobs)} different requests, {rate:.2f} each second ({LOAD:.0%} of the most)", flush=True)
        began_s = time.monotonic()
        for rest in range(RESTS):
            until_s = began_s + (rest + 1) * minutes * 60 / RESTS
            await self.work(until_s, rate, lethal=rest < RESTS / 3)
            self.problems += [f"left over: {what}" for what in await self.deployment.until_at_rest()]
            self.samples.append(await asyncio.to_thread(self.sample, (time.monotonic() - began_s) / 60))
            print(self.row(self.samples[-1]), flush=True)

    # -- load ---------------------------------------------------------------------------------------------------------
    async def learn_chats(self) -> None:
        """Conversations: each turn is a request that holds the turns before it with their answers."""
        async with self.load.session() as session:
            for chat in range(CHATS):
                messages: list[dict[str, str]] = []
                for turn in range(TURNS):
                    messages = [*messages, {"role": "user", "content": f"chat {chat}, turn {turn}: and then?"}]
                    body = {"model": "oracle", "messages": messages, "temperature": 0, "max_tokens": 24}
                    job = Job("/v1/chat/completions", body)
                    told = (await self.load.ask(session, job, key=None, streamed=False)).told()
                    self.load.jobs = [*self.load.jobs, job]
                    self.load.expected.append(told)
                    messages = [*messages, {"role": "assistant", "content": told[0][0]}]

    async def saturated_rate(self) -> float:
        """Answers each second when all slots and as many waiting places are taken."""
        over = asyncio.Event()
        jobs, expected = self.load.jobs, self.load.expected
        places = self.rng.sample(range(len(jobs)), 2 * SLOTS)
        some = Load(self.load.url, [jobs[place] for place in places])
        some.expected = [expected[place] for place in places]
        clients = asyncio.create_task(some.run(over, keyed=0.5, patience_s=PATIENCE_S))
        await asyncio.sleep(CALIBRATION_S)
        answers = some.answers
        over.set()
        await clients
        self.problems += some.problems
        return answers / CALIBRATION_S

    async def work(self, until_s: float, rate: float, *, lethal: bool) -> None:
        """Clients arrive and things break until then; who has come is waited for."""
        async with self.load.session() as session, asyncio.TaskGroup() as tasks:
            breaking = asyncio.create_task(self.break_things(lethal=lethal))
            while time.monotonic() < until_s:
                await asyncio.sleep(self.rng.expovariate(rate))
                tasks.create_task(self.client(session, keyed=lethal or self.rng.random() < 0.5))
            breaking.cancel()
            await asyncio.gather(breaking, return_exceptions=True)
            self.deployment.send(signal.SIGCONT, *KINDS)
            await asyncio.to_thread(self.deployment.until_healthy)

    async def client(self, session: aiohttp.ClientSession, *, keyed: bool) -> None:
        """One request, read to its end and compared, or left."""
        place = self.rng.randrange(len(self.load.jobs))
        key = uuid.uuid4().hex if keyed else None
        streamed = self.rng.random() < 0.7
        leaves = self.rng.random() < LEAVE
        expected = self.load.expected[place]
        try:
            async with asyncio.timeout(self.rng.uniform(0.0, 2.0) if leaves else PATIENCE_S):
                answer = await self.load.ask(session, self.load.jobs[place], key=key, streamed=streamed)
            if answer.told() != expected:
                raise WrongAnswer(difference(expected, answer.told()))
            self.answers += 1
        except TimeoutError:
            if leaves:
                self.left += 1
            else:
                self.problems.append(f"request {place} hangs")
        except Exception as error:
            self.problems.append(f"request {place} ({'keyed' if keyed else 'no key'}): {type(error).__name__}: {error}")
        self.load.streams.clear()

    # -- faults -------------------------------------------------------------------------------------------------------
    async def break_things(self, *, lethal: bool) -> None:
        """Now and then, one at a time, until cancelled."""
        harmless: tuple[Callable[[], None], ...] = (self.cut_connections, self.pause_redis, self.freeze_briefly)
        deadly: tuple[Callable[[], None], ...] = (self.kill_an_actor, self.restart_redis)
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * FAULT_EVERY_S)
            fault = self.rng.choice((*harmless, *deadly) if lethal else harmless)
            self.faults[fault.__name__] = self.faults.get(fault.__name__, 0) + 1
            await asyncio.to_thread(fault)

    def cut_connections(self) -> None:
        self.deployment.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def pause_redis(self) -> None:
        self.deployment.redis.execute_command("CLIENT", "PAUSE", 3000)

    def freeze_briefly(self) -> None:
        """For less than the time of a lease."""
        kind = self.rng.choice(KINDS)
        self.deployment.send(signal.SIGSTOP, kind)
        time.sleep(3)
        self.deployment.send(signal.SIGCONT, kind)

    def kill_an_actor(self) -> None:
        self.deployment.kill(self.rng.choice(KINDS))

    def restart_redis(self) -> None:
        self.deployment.kill_redis()
        self.deployment.start_redis()

    # -- figures ------------------------------------------------------------------------------------------------------
    def sample(self, minute: float) -> Sample:
        """What the deployment holds now."""
        processes = self.deployment.actors() | {"supervisor": psutil.Process(self.deployment.process.pid)}
        memory = {name: process.memory_info().rss / 2**20 for name, process in sorted(processes.items())}
        files = {name: process.num_fds() for name, process in processes.items()}
        told = self.deployment.redis.info("memory")
        return Sample(minute, memory, files, told["used_memory"] / 2**20, self.deployment.redis.dbsize())

    def row(self, sample: Sample) -> str:
        memory = ", ".join(f"{name} {size:.1f}" for name, size in sample.memory.items())
        return (
            f"minute {sample.minute:4.1f}: {self.answers} answers, {self.left} left, MiB: {memory}, "
            f"redis {sample.redis_used:.2f}; {sum(sample.files.values())} files, {sample.keys} keys"
        )

    def grown(self) -> list[str]:
        """What has grown from the first rest after the lethal third to the last one."""
        first, last = self.samples[RESTS // 3], self.samples[-1]
        pairs: dict[str, tuple[float, float]] = {"redis": (first.redis_used, last.redis_used)}
        for name, size in last.memory.items():
            pairs[name] = first.memory[name], size
            pairs[f"files of {name}"] = first.files[name], last.files[name]
        return [f"{name}: {a:.2f} -> {b:.2f}" for name, (a, b) in pairs.items() if b > a * (1 + MOST_GROWTH)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", type=Path, help="also write all samples there")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="pagebus-soak-") as folder,
        deployed(Path(folder), "--max-num-seqs", str(SLOTS), step_ms=STEP_MS) as deployment,
    ):
        soak = Soak(deployment, Load(deployment.url, structured(make_jobs(64, seed=1, most_tokens=96))))
        asyncio.run(soak.run(arguments.minutes))
        if deployment.stop() != 0:
            soak.problems.append("the deployment did not end well")
    problems = soak.problems + [f"has grown: {what}" for what in soak.grown()]
    print(f"faults: {soak.faults}")
    print("\n".join(problems) or "nothing wrong, nothing grown, nothing left over")
    if arguments.json:
        told = {"answers": soak.answers, "left": soak.left, "faults": soak.faults, "problems": problems}
        arguments.json.write_text(json.dumps(told | {"samples": [asdict(each) for each in soak.samples]}) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
