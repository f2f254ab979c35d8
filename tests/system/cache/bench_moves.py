"""What blocks that move are worth: `python -m tests.system.cache.bench_moves [MODEL] [--tokens N] [--streams S]`.

Two executors, each a process with a GPU of its own, over a Redis. In turn with moves (``--kv-moves``) and without:

1. Prompts with a prefix of N tokens are computed on the first executor. Then S streams fill all of its slots, so that
   further prompts with these prefixes must run on the other one. Measured: the time to the first token.
2. The first executor drains (SIGTERM). Measured: the seconds until all S streams have a token from the other, and the
   longest pause between two tokens of each stream; then, and until a second after the first executor has ended.

MODEL is a folder, a hub id, or the name of a shape of ``pagebus bench``, such as llama8b, with dummy weights. By
default it is the shipped model, on a CPU if there is no GPU. One GPU twice will do for a try (``--gpus 0 0
--gpu-memory-utilization 0.4``), and two GPUs for two groups of two ranks (``--gpus 0 1 0 1 --tensor-parallel-size
2``). The bench says what it does, and prints one line of JSON for each case.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import SIGTERM
from statistics import median
from typing import Any

import uvloop

from pagebus.actors.bench.driver.deployment import as_served, scratch
from pagebus.actors.model.config import ModelConfig, max_positions, resolve_model
from pagebus.actors.runtime.child import die_with_parent
from pagebus.actors.runtime.gc_tuning import keep_what_is_there
from pagebus.actors.runtime.gpus import visible_gpus
from pagebus.actors.settings import Settings
from pagebus.actors.settings.sources import add_arguments, field_types, load_settings
from pagebus.actors.telemetry import logs
from pagebus.bus.private_redis.server import PrivateRedis
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.system.cache.pull_timeline import Timeline
from tests.system.curtain import Curtain
from tests.system.executor_processes import ExecutorProcesses
from tests.system.harness import System

FIRST, SECOND = "executor-0", "executor-1"
OURS = ("model", "bus", "name", "host", "port", "executors", "actor_name", "data_dir", "log_format", "max_num_seqs")
SUFFIX = 16
"""Tokens of each prompt behind its prefix."""
CALM_S = 1.0
AFTER = 16
"""Tokens of each stream from the second executor in which pauses still count as the drain's."""
GRAPHS_S = 30.0
"""Longest wait for CUDA graphs."""
STREAM_TOKENS = 6144
"""Most tokens that a stream gives. It must not end before the bench."""
BEGAN_S = time.monotonic()


def say(text: str) -> None:
    """What happens, and when."""
    print(f"[{time.monotonic() - BEGAN_S:6.1f} s] {text}", flush=True)


@dataclass(slots=True)
class Bench:
    """One case: the system, its executors, and what was found. ``watch`` sees all executors."""

    system: System
    processes: ExecutorProcesses
    hidden: set[str]
    watch: RedisBus
    vocab_size: int
    told: dict[str, Any]
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    streams: list[str] = field(default_factory=list)
    timeline: Timeline | None = None

    async def until(self, what: str, holds: Callable[[], object], look_s: float = 0.002) -> None:
        """Wait; say every few seconds what for. The scheduler's loop is the same one: do not look too often."""
        said_s = time.monotonic()
        while not holds():
            self.processes.check()
            self.system.check()
            if time.monotonic() - said_s > 5.0:
                said_s = time.monotonic()
                say(f"  still waiting until {what}")
            await asyncio.sleep(look_s)

    async def info(self, name: str) -> dict[str, Any]:
        """What an executor's lease says."""
        return next((dict(lease.info) for lease in await self.watch.leases("executor") if lease.name == name), {})

    async def until_ready(self, name: str) -> None:
        """Until an executor can compute."""
        said = ""
        while (info := await self.info(name)).get("state") != "ready":
            self.processes.check()
            if said != (phase := str(info.get("phase", "not there yet"))):
                said = phase
                say(f"  {name}: {phase}")
            await asyncio.sleep(0.02)
        say(f"  {name}: ready")

    async def until_captured(self, name: str) -> None:
        """Until its CUDA graphs are there, if it has any, or that takes too long."""
        deadline_s = time.monotonic() + GRAPHS_S
        while True:
            info = await self.info(name)
            captured, planned = info.get("num_graphs", 0), info.get("num_planned_graphs", 0)
            if captured >= planned or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.1)
        if planned:
            say(f"  {name}: {captured} of {planned} graphs")

    def prompt(self, count: int) -> list[int]:
        """Random tokens."""
        return [self.rng.randrange(self.vocab_size // 8, self.vocab_size * 7 // 8) for _ in range(count)]

    async def first_token_ms(self, prompt: list[int], on: str) -> float:
        """Milliseconds until the first token of a prompt, which must run there."""
        collector = self.system.collector
        began_s = time.monotonic()
        request_id, answer = self.system.submit(prompt, max_tokens=1)
        await self.until(f"{request_id} is answered", answer.done)
        at_s, stream = collector.came[request_id][0]
        if stream != self.system.names.results(on):
            raise RuntimeError(f"a prompt for {on} ran elsewhere: {stream}")
        return (at_s - began_s) * 1e3

    async def first_tokens(self, name: str, prompts: Iterable[list[int]], on: str) -> None:
        """Ask one prompt after another."""
        took = [await self.first_token_ms(prompt, on) for prompt in prompts]
        self.told[f"{name}_ms"] = round(median(took), 2)
        self.told[f"{name}_all_ms"] = [round(each, 2) for each in took]
        say(f"  {name}: {median(took):.1f} ms ({min(took):.1f} to {max(took):.1f})")

    async def start_streams(self, count: int, prompt_tokens: int) -> None:
        """As many as the first executor has slots."""
        longest = self.system.settings.max_model_len
        assert longest is not None
        for _ in range(count):
            prompt = self.prompt(prompt_tokens)
            self.streams.append(self.system.submit(prompt, max_tokens=longest - prompt_tokens)[0])
        await self.until_all("each stream gives tokens", 8, self.system.names.results(FIRST))

    async def until_all(self, what: str, count: int, stream: str) -> None:
        """Until each of the streams has so many tokens from there."""
        await self.until(what, lambda: all(self.num_from(name, stream) >= count for name in self.streams), 0.02)

    def num_from(self, name: str, stream: str) -> int:
        """How many of a stream's last tokens have come from an executor, as far as anybody asks."""
        came = self.system.collector.came.get(name, [])
        return sum(each == stream for _, each in came[-4 * AFTER :])

    def pauses_ms(self, since_s: float, until_s: float) -> list[float]:
        """The longest of each stream's pauses that lie in this time."""
        longest = []
        for name in self.streams:
            times_s = [at_s for at_s, _ in self.system.collector.came[name] if at_s <= until_s]
            gaps = [after - before for before, after in itertools.pairwise(times_s) if after >= since_s]
            longest.append(max(gaps, default=until_s - since_s) * 1e3)
        return longest

    def tell_pauses(self, name: str, since_s: float, until_s: float) -> None:
        """Add them to the results."""
        pauses = self.pauses_ms(since_s, until_s)
        self.told |= {f"{name}_median_ms": round(median(pauses), 1), f"{name}_max_ms": round(max(pauses), 1)}
        say(f"  longest pauses ({name}): median {median(pauses):.1f} ms, max {max(pauses):.1f} ms")

    def tell_counts(self, name: str) -> None:
        """What has been pulled so far by the second executor."""
        counts = asdict(self.system.scheduler.core.replicas[SECOND].moves)
        self.told[name] = counts
        say(f"  {name}: {counts}")


async def run(bench: Bench, asked: argparse.Namespace) -> None:
    """All of one case."""
    prefixes = [bench.prompt(asked.tokens) for _ in range(asked.repeats + 1 + asked.traced)]
    for name in bench.processes.names:
        bench.processes.start(name)
    await bench.until_ready(FIRST)
    await bench.until(f"{FIRST} has joined", lambda: FIRST in bench.system.scheduler.core.replicas)
    await bench.first_tokens("warm_up", [bench.prompt(asked.tokens) for _ in range(2)], FIRST)
    say(f"{len(prefixes)} prefixes of {asked.tokens} tokens on {FIRST}")
    await bench.first_tokens("computed", prefixes, FIRST)
    await bench.first_tokens("own_cache", [each + bench.prompt(SUFFIX) for each in prefixes], FIRST)
    await bench.until_ready(SECOND)
    await asyncio.gather(*map(bench.until_captured, (FIRST, SECOND)))
    await other_prefixes(bench, asked, prefixes)
    await drain(bench)


async def other_prefixes(bench: Bench, asked: argparse.Namespace, prefixes: list[list[int]]) -> None:
    """Prompts that must run on the second executor, beside streams that fill the first."""
    say(f"{asked.streams} streams on {FIRST}, then {SECOND} joins")
    await bench.start_streams(asked.streams, asked.stream_tokens)
    bench.hidden.clear()
    await bench.until(f"{SECOND} has joined", lambda: SECOND in bench.system.scheduler.core.replicas)
    warm_up = [bench.prompt(asked.tokens + SUFFIX), *(bench.prompt(SUFFIX * each) for each in (1, 4))]
    await bench.first_tokens("second_warm_up", warm_up, SECOND)
    say(f"the prefixes again, on {SECOND}")
    await bench.first_tokens("first_other_cache", [prefixes[0] + bench.prompt(SUFFIX)], SECOND)
    await bench.first_tokens(
        "other_cache", [each + bench.prompt(SUFFIX) for each in prefixes[1 : -asked.traced]], SECOND
    )
    bench.tell_counts("pulled_for_prefixes")
    bench.timeline = Timeline(bench.system.scheduler.core, SECOND)
    await trace(bench, bench.timeline, prefixes[-asked.traced :])


async def trace(bench: Bench, timeline: Timeline, prefixes: list[list[int]]) -> None:
    """Say where the time to a first token goes: behind a prefix that is pulled, then from its own cache."""
    taken = dict[tuple[str, str], list[float]]()
    for name, prefix in ((name, prefix) for prefix in prefixes for name in ("pulled", "own")):
        prompt = prefix + bench.prompt(SUFFIX)
        timeline.note("asked")
        timeline.reach("asked")
        await bench.first_token_ms(prompt, SECOND)
        timeline.note("answered")
        for stage, took_ms in timeline.stages_ms().items():
            taken.setdefault((name, stage), []).append(took_ms)
        say(f"  {name}, ms: {timeline.told()}")
    for (name, stage), all_ms in sorted(taken.items()):
        low = sorted(all_ms)[len(all_ms) // 4]
        say(f"  {name}, {stage}: median {median(all_ms):.2f} ms, lower quartile {low:.2f}, {len(all_ms)} prompts")


async def drain(bench: Bench) -> None:
    """The first executor leaves its streams to the second."""
    replicas, there = bench.system.scheduler.core.replicas, bench.system.names.results(SECOND)
    await asyncio.sleep(CALM_S)
    bench.told["drain_tokens"] = sum(len(bench.system.collector.tokens[name]) for name in bench.streams)
    bench.told["drain_tokens"] += len(bench.streams) * bench.told["stream_tokens"]
    now_s = time.monotonic()
    bench.tell_pauses("calm", now_s - CALM_S, now_s)
    say(f"{FIRST} drains")
    if bench.timeline:
        bench.timeline.told()
        bench.timeline.note("told to drain")
    bench.processes.send(FIRST, SIGTERM)
    began_s = time.monotonic()
    await bench.until("the scheduler has seen it", lambda: FIRST not in replicas or replicas[FIRST].suspended)
    bench.told["drain_seen_s"] = round(time.monotonic() - began_s, 3)
    ended = asyncio.create_task(bench.processes.until_ended(FIRST))
    await bench.until_all("each stream has a token from there", 1, there)
    firsts = [next(at_s for at_s, stream in bench.system.collector.came[name] if stream == there) - began_s
              for name in bench.streams]  # fmt: skip
    bench.told |= {"drain_median_s": round(median(firsts), 3), "drain_all_s": round(max(firsts), 3)}
    say(f"  all streams run on {SECOND}: median {median(firsts):.3f} s, the last after {max(firsts):.3f} s")
    await bench.until_all(f"each has {AFTER}", AFTER, there)
    over_s = time.monotonic()
    bench.tell_pauses("drain_pause", began_s, over_s)
    bench.tell_counts("pulled_in_all")
    if bench.timeline:
        say(f"  drain, ms: {bench.timeline.told()}")
    bench.told["drain_exit_code"] = await ended
    bench.told["drain_exit_s"] = round(time.monotonic() - began_s, 3)
    await asyncio.sleep(CALM_S)
    bench.tell_pauses("end_of_lender", over_s, time.monotonic())


@contextlib.asynccontextmanager
async def started(settings: Settings, asked: argparse.Namespace, folder: Path) -> AsyncIterator[Bench]:
    """A system without executors, over a Redis of its own."""
    redis = PrivateRedis(None, before_exec=die_with_parent())
    url, hidden, names = await redis.start(), {SECOND}, Names(settings.name)
    options = {key: value for key, value in vars(settings).items() if key not in ("model", "executors")}
    system = System(resolve_model(settings), lambda: Curtain(url, hidden, names), executors=0, **options)
    gpus = asked.gpus if settings.device != "cpu" else []
    processes = ExecutorProcesses(settings, url, folder, 2, gpus)
    watch = Curtain(url, set(), names)
    try:
        await watch.connect()
        await system.start()
        vocab_size = ModelConfig.load(resolve_model(settings, weights=False)).vocab_size
        keep_what_is_there()
        yield Bench(system, processes, hidden, watch, vocab_size, {"kv_moves": settings.kv_moves})
    finally:
        processes.destroy()
        await system.vanish()
        await watch.close()
        await redis.stop()


def settings_of(asked: argparse.Namespace, folder: Path, kv_moves: str) -> Settings:
    """For one case. Guessed tokens would blur the pauses."""
    settings = as_served(load_settings(asked), folder)
    if settings.max_model_len is None:
        most = max_positions(ModelConfig.load(resolve_model(settings, weights=False)))
        wanted = max(asked.tokens + 2 * SUFFIX, asked.stream_tokens + STREAM_TOKENS)
        settings = settings.replace(max_model_len=min(most, wanted))
    guesses = settings.spec_method or "none"
    return settings.replace(max_num_seqs=asked.streams, kv_moves=kv_moves, spec_method=guesses)


async def case(asked: argparse.Namespace, kv_moves: str, limit_s: float) -> bool:
    """One case; whether it came to its end. What was found before is printed in any case."""
    say(f"--kv-moves {kv_moves}, for at most {limit_s:.0f} s")
    with scratch() as folder:
        settings = settings_of(asked, folder, kv_moves)
        async with started(settings, asked, folder) as bench:
            bench.told |= {"model": asked.model or "shipped", "tokens": asked.tokens, "streams": asked.streams}
            bench.told |= {"stream_tokens": asked.stream_tokens}
            try:
                async with asyncio.timeout(limit_s):
                    await run(bench, asked)
            except Exception as error:
                bench.told["error"] = f"{type(error).__name__}: {error}"
                for name in bench.processes.names:
                    say(f"end of the log of {name}:\n{bench.processes.tail(name)}")
            print(json.dumps(bench.told), flush=True)
            return "error" not in bench.told


async def measure(asked: argparse.Namespace) -> int:
    """All cases; the exit code."""
    ended = []
    for done, kv_moves in enumerate(asked.cases):
        left_s = asked.limit_s - (time.monotonic() - BEGAN_S)
        ended.append(await case(asked, kv_moves, left_s / (len(asked.cases) - done)))
    say("done")
    return 0 if all(ended) else 1


def main() -> int:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--tokens", type=int, help="of each prefix (default: 8192, or 700 on a CPU)")
    parser.add_argument("--streams", type=int, help="(default: 64, or 8 on a CPU)")
    parser.add_argument("--stream-tokens", type=int, help="of each stream's prompt (default: 512, or 128 on a CPU)")
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each kind (default: 5)")
    parser.add_argument("--traced", type=int, default=2, help="prefixes whose time is told by stages (default: 2)")
    parser.add_argument(
        "--gpus",
        nargs="+",
        help="ids for CUDA_VISIBLE_DEVICES, one for each rank (default: all that are visible)",
    )
    parser.add_argument("--cases", nargs="*", help="values of --kv-moves to compare (default: the one given, and off)")
    parser.add_argument("--limit-s", type=float, default=145.0, help="longest time of all (default: 145)")
    add_arguments(parser, model=False, only=[name for name in field_types() if name not in OURS])
    asked = parser.parse_args()
    asked.gpus = asked.gpus or visible_gpus(os.environ)
    if not asked.gpus and getattr(asked, "device", "auto") == "auto":
        asked.device = "cpu"
    sizes = (700, 8, 128) if getattr(asked, "device", "auto") == "cpu" else (8192, 64, 512)
    for name, size in zip(("tokens", "streams", "stream_tokens"), sizes, strict=True):
        setattr(asked, name, getattr(asked, name) or size)
    asked.cases = asked.cases or [getattr(asked, "kv_moves", "host"), "off"]
    logs.configure("warning", "text")
    return uvloop.run(measure(asked))


if __name__ == "__main__":
    sys.exit(main())
