"""Uses of moves, on two GPUs or on one twice: `python -m tests.gpu.moves.check_uses [MODEL] [--gpus 0 0] [OPTIONS]`.

Two executors, each a process, and a scheduler in this one. Each use runs twice over the same prompts, once without it;
with ``--deterministic`` all answers must be the same, to the token:

1. ``ahead``: a prefill and a decode executor. Prompts of several steps are computed without roles, then handed over
   without pulls beside them, then with. Printed: how long the sequences pause as they change the executor, and how many
   blocks had been pulled when their first token came.
2. ``auto``: ``--roles auto`` under long prompts beside chats. Printed: when it adopts roles, and the pauses.
3. ``neighbour``: sequences fill one executor and grow until it preempts. Printed: how many go on on the other.

MODEL is a folder or the name of a shape of ``pagebus bench``. OPTIONS are those of an executor.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from asyncio import Future
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import uvloop

from pagebus.actors.bench.driver.deployment import as_served, scratch
from pagebus.actors.runtime.gpus import visible_gpus
from pagebus.actors.scheduler.core import admission, planner
from pagebus.actors.scheduler.core.placement import choose, send_ahead
from pagebus.actors.scheduler.events import CachesReset
from pagebus.actors.scheduler.fleet.auto_roles import AutoRoles
from pagebus.actors.scheduler.fleet.fleet import Fleet, Rows
from pagebus.actors.scheduler.fleet.neighbours import Neighbours
from pagebus.actors.scheduler.request import Sequence
from pagebus.actors.settings.sources import add_arguments, field_types, load_settings
from pagebus.actors.telemetry import logs
from tests.system.cache.bench_moves import FIRST, OURS, SECOND, Bench, say, started

Asked = tuple[str, Future[list[int]]]


class Check:
    """What all uses need of a bench."""

    def __init__(self, bench: Bench, asked: argparse.Namespace) -> None:
        self.bench, self.asked = bench, asked
        self.core = bench.system.scheduler.core
        self.is_right = True
        self._expected: dict[str, list[list[int]]] = {}

    def begin(self, num_prefills: int) -> int:
        """A run with so many prefill executors, none of whose blocks are cached. Returns the blocks pulled before."""
        self.core.planner.roles.set_prefills(num_prefills, self.core.planner.fleet)
        self.core.handle(CachesReset(host=True, running=False))
        return self.pulled()

    def pulled(self) -> int:
        """Blocks, by now."""
        return sum(replica.moves.num_pulled for replica in self.core.replicas.values())

    def departures(self) -> int:
        """Sequences that were preempted to the neighbour, by now."""
        return sum(replica.counts.num_departures for replica in self.core.replicas.values())

    def pauses_ms(self, asked: list[Asked]) -> tuple[list[float], list[float]]:
        """Of all tokens; and those in which a sequence changed its executor."""
        every, handed = list[float](), list[float]()
        for name, _ in asked:
            for (before_s, before), (at_s, stream) in pairwise(self.bench.system.collector.came[name]):
                every.append((at_s - before_s) * 1e3)
                handed += [every[-1]] if stream != before else []
        return every, handed

    async def answers(self, asked: list[Asked], use: str, run: str) -> None:
        """Wait for all, and say how many are those of the use's first run."""
        answers = asyncio.gather(*(answer for _, answer in asked))
        await self.bench.until("all are answered", answers.done)
        expected = self._expected.setdefault(use, answers.result())
        same = sum(map(list.__eq__, answers.result(), expected))
        self.is_right &= same == len(expected)
        say(f"  {use}, {run}: {same} of {len(expected)} answers are the same")


async def ahead(check: Check) -> None:
    """Prompts of several steps, one after another."""
    bench, asked = check.bench, check.asked
    prompts = [bench.prompt(asked.prompt_tokens) for _ in range(asked.prompts)]
    came = bench.system.collector.came
    for run, prefills in (("without roles", 0), ("handed over at once", 1), ("chunk by chunk", 1)):
        sends = send_ahead if run == "chunk by chunk" else lambda *_: None
        with patch.object(AutoRoles, "look", return_value=False), patch.object(planner, "send_ahead", sends):
            before, early, made = check.begin(prefills), 0, list[Asked]()
            for prompt in prompts:
                had = check.pulled()
                made.append(bench.system.submit(prompt, max_tokens=asked.answer_tokens))
                await bench.until("it begins", partial(came.get, made[-1][0]), 0.0005)
                early += check.pulled() - had
                await bench.until("it is answered", made[-1][1].done)
            await check.answers(made, "ahead", run)
        _, handed = check.pauses_ms(made)
        pauses = f", pauses {median(handed):.1f} ms, at most {max(handed):.1f}" if handed else ""
        say(f"    {len(handed)} of {len(prompts)} handed over{pauses}")
        say(f"    {check.pulled() - before} blocks pulled, {early} of them by the first token")


async def auto(check: Check) -> None:
    """Long prompts beside chats."""
    asked, rng = check.asked, random.Random(1)
    kinds = (asked.long_per_s, asked.long_tokens, asked.answer_tokens), (asked.chats_per_s, 200, 200)
    load = sorted(
        (rng.random() * asked.load_s, check.bench.prompt(tokens), output)
        for per_s, tokens, output in kinds for _ in range(round(per_s * asked.load_s))
    )  # fmt: skip
    roles, look, now_s = check.core.planner.roles, AutoRoles.look, asyncio.get_running_loop().time
    for run in ("both do both", "auto"):
        with patch.object(AutoRoles, "look", look if run == "auto" else lambda *_: False):
            before, since_s, counts, made = check.begin(0), now_s(), [(0, 0.0)], list[Asked]()
            for at_s, prompt, output in load:
                await asyncio.sleep(since_s + at_s - now_s())
                made.append(check.bench.system.submit(prompt, max_tokens=output))
                counts += [(roles.num_prefill, at_s)] if roles.num_prefill != counts[-1][0] else []
            await check.answers(made, "auto", run)
        every, handed = check.pauses_ms(made)
        p99 = sorted(every)[len(every) * 99 // 100]
        say(f"    prefill executors: {', '.join(f'{count} after {at_s:.1f} s' for count, at_s in counts)}")
        say(f"    {len(handed)} of {len(load)} handed over, {check.pulled() - before} blocks pulled")
        say(f"    pauses: median {median(every):.1f} ms, p99 {p99:.1f}, longest {max(every):.1f}")


async def neighbour(check: Check) -> None:
    """Prompts that fill one executor, and grow, while the other has nothing to do."""
    asked, first = check.asked, check.core.replicas[FIRST]
    count = first.pool.num_blocks * first.block_size // asked.grow_tokens
    prompts = [check.bench.prompt(asked.grow_tokens) for _ in range(count)]
    finds = Neighbours._with_room
    for run in ("computed again", "to the neighbour"):
        room = finds if run == "to the neighbour" else lambda *_: None
        with (
            patch.object(AutoRoles, "look", return_value=False), patch.object(Neighbours, "_with_room", room),
            patch.object(admission, "choose", on_the_first),
        ):  # fmt: skip
            before = check.begin(0)
            preempted, moved = check.core.num_preemptions, check.departures()
            made = [check.bench.system.submit(prompt, max_tokens=asked.grow_by) for prompt in prompts]
            await check.answers(made, "neighbour", run)
        every, handed = check.pauses_ms(made)
        say(f"    {check.core.num_preemptions - preempted} preempted, {check.departures() - moved} to the neighbour")
        say(f"    {len(handed)} changes of the executor, {check.pulled() - before} blocks pulled")
        say(f"    longest pause {max(every):.1f} ms")


def on_the_first(sequence: Sequence, fleet: Fleet, able: Rows, pulls: Any) -> Any:
    """In place of `choose`: what has no token yet begins on the first executor."""
    if not sequence.produced:
        able = able.copy()
        able[fleet.row(SECOND)] = False
    return choose(sequence, fleet, able, pulls)


USES: dict[str, Callable[[Check], Awaitable[None]]] = {"ahead": ahead, "auto": auto, "neighbour": neighbour}


async def run(asked: argparse.Namespace) -> int:
    """Start both executors, then try each use; the exit code."""
    with scratch() as folder:
        settings = as_served(load_settings(asked), folder).replace(roles="auto")
        async with started(settings, asked, folder) as bench:
            bench.hidden.clear()
            for name in bench.processes.names:
                bench.processes.start(name)
            try:
                for name in (FIRST, SECOND):
                    await bench.until_ready(name)
                check = Check(bench, asked)
                await bench.until("both have joined", lambda: len(check.core.replicas) == 2)
                for use in asked.uses:
                    say(use)
                    await USES[use](check)
            except Exception:
                for name in bench.processes.names:
                    say(f"end of the log of {name}:\n{bench.processes.tail(name)}")
                raise
    return 0 if check.is_right else 1


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="llama8b")
    parser.add_argument("--uses", nargs="+", choices=USES, default=list(USES))
    parser.add_argument("--gpus", nargs="+", help="ids for CUDA_VISIBLE_DEVICES (default: all that are visible)")
    parser.add_argument("--prompts", type=int, default=6, help="of several steps")
    parser.add_argument("--prompt-tokens", type=int, default=30_000)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--load-s", type=float, default=15.0)
    parser.add_argument("--long-per-s", type=float, default=3.0)
    parser.add_argument("--long-tokens", type=int, default=4096)
    parser.add_argument("--chats-per-s", type=float, default=5.0)
    parser.add_argument("--grow-tokens", type=int, default=4000)
    parser.add_argument("--grow-by", type=int, default=900)
    add_arguments(parser, model=False, only=sorted(set(field_types()) - set(OURS) | {"max_num_seqs"}))
    asked = parser.parse_args()
    asked.gpus = asked.gpus or visible_gpus(os.environ)
    logs.configure("warning", "text")
    return uvloop.run(run(asked))


if __name__ == "__main__":
    sys.exit(main())
