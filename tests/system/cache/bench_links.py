"""Whether pulls over slow links are chosen right: `python -m tests.system.cache.bench_links [--rounds N] [--tokens N]`.

Two executors on hosts of their own (:mod:`tests.system.network_hosts`), on CPUs, with ``--kv-moves network``. Prompts
have a prefix that only the first host has cached, and run on the second. The links get one rate after another, around
the one at which pulling and computing take equally long. For each rate, in turn, the time to the first token is
measured with three choices: the scheduler's own, a pull in any case, and none, as with ``--kv-moves off``; beside them
with the prefix in the second host's own cache.

``expected`` is the time of the scheduler's choices if each takes as long as the median of what was chosen: it is to be
within 5% of the better of the two. ``even``: the link's rate as a part of the one at which both take equally long;
``first``: the first pull of a link of which nothing is known; ``link``: Mb/s as pulls have shown them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import uvloop

from pagebus.actors.scheduler.fleet.fleet import Fleet, Rows
from pagebus.actors.scheduler.kv.read_rate import ReadRate
from pagebus.actors.scheduler.moves.link import Link
from pagebus.actors.scheduler.moves.pulls import Pulls
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence
from pagebus.actors.telemetry import logs
from pagebus.bus.streams import Names
from tests.helpers.model_factory import make_model
from tests.system.cache.bench_moves import FIRST, SECOND, Bench
from tests.system.curtain import Curtain
from tests.system.executor_processes import ExecutorProcesses
from tests.system.harness import System
from tests.system.network_hosts import NetworkHosts, why_not

OWN, PULL, COMPUTE, CACHED = "own", "pull", "compute", "cached"
CHOICES = (OWN, PULL, COMPUTE)
FACTORS = (0.125, 0.5, 0.8, 1.0, 1.25, 2.0, 8.0)
"""Rates, as parts of the one at which a pull takes as long as computing."""
RATES = (1000.0, 10000.0)
"""Further rates, Mb/s."""
WITHIN = 1.05
PREFIXES = 3
SUFFIX = 16
WARM_UP = 5
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}  # fmt: skip
"""Of a model with many bytes of cache for each token, and little to compute."""


@dataclass(slots=True)
class Forced:
    """What the scheduler must choose, and where prompts run."""

    choice: str = OWN
    place: str = FIRST

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Have the schedulers of this process obey. What is forced teaches them nothing of links."""
        waits, can_lend, can_hold = Link.waits, Pulls.can_lend, Fleet.can_hold
        learn, began = ReadRate.learn, ReadRate.began

        def forced_waits(link: Link, num_blocks: int) -> float:
            return 0.0 if self.choice == PULL else waits(link, num_blocks)

        def forced_can_lend(pulls: Pulls, lender: Replica, target: Replica, *, hosts: bool = False) -> bool:
            return self.choice != COMPUTE and can_lend(pulls, lender, target, hosts=hosts)

        def forced_learn(rate: ReadRate, bytes_per_s: float) -> None:
            if self.choice == OWN:
                learn(rate, bytes_per_s)

        def forced_began(rate: ReadRate) -> None:
            if self.choice == OWN:
                began(rate)

        def forced_can_hold(fleet: Fleet, sequence: Sequence) -> Rows:
            return can_hold(fleet, sequence) & np.array([each.name == self.place for each in fleet.replicas])

        with (
            patch.object(Link, "waits", forced_waits), patch.object(Pulls, "can_lend", forced_can_lend),
            patch.object(ReadRate, "learn", forced_learn), patch.object(ReadRate, "began", forced_began),
            patch.object(Fleet, "can_hold", forced_can_hold),
        ):  # fmt: skip
            yield


@dataclass(slots=True)
class Case:
    """What was measured at one rate: milliseconds by choice, and for the scheduler's own whether it pulled."""

    megabits_per_s: float
    even: float
    ms: dict[str, list[float]] = field(default_factory=lambda: {each: [] for each in (*CHOICES, CACHED)})
    pulled: list[bool] = field(default_factory=list)
    first_ms: float = 0.0
    seen_megabits_per_s: float = 0.0

    def median_ms(self, choice: str) -> float:
        """Of one choice."""
        return median(self.ms[choice])

    @property
    def best_ms(self) -> float:
        """Of the better of the two."""
        return min(self.median_ms(PULL), self.median_ms(COMPUTE))

    @property
    def expected_ms(self) -> float:
        """Of the scheduler's choices, if each takes as long as the median of what was chosen."""
        share = sum(self.pulled) / len(self.pulled)
        return share * self.median_ms(PULL) + (1 - share) * self.median_ms(COMPUTE)

    @property
    def is_right(self) -> bool:
        """Whether the choices cost at most 5% more than the better one."""
        return self.expected_ms <= WITHIN * self.best_ms

    def line(self) -> str:
        """For the table."""
        numbers = [self.median_ms(each) for each in (CACHED, PULL, COMPUTE, OWN)]
        times = "".join(f"{each:9.1f}" for each in (*numbers, self.expected_ms, self.first_ms))
        pulls = f"{sum(self.pulled)}/{len(self.pulled)}"
        more = f"{(self.expected_ms / self.best_ms - 1) * 100:+.1f}%"
        seen = f"{self.seen_megabits_per_s:8.0f}{pulls:>8}{more:>8}"
        return f"{self.megabits_per_s:8.0f}{self.even:6.2f}{times}{seen}  {'yes' if self.is_right else 'NO'}"


@dataclass(slots=True)
class Links:
    """The system on its hosts."""

    bench: Bench
    hosts: NetworkHosts
    forced: Forced
    prefixes: list[list[int]]
    startup_tokens_per_s: float = 0.0

    @property
    def target(self) -> Replica:
        """The replica of the second host."""
        return self.bench.system.scheduler.core.replicas[SECOND]

    async def first_token_ms(self, choice: str, number: int) -> tuple[float, bool]:
        """Of a prompt with a prefix that the second host does not have; and whether it was pulled."""
        if choice != CACHED:
            self.forget()
        self.forced.choice = choice
        before = self.target.moves.num_pulled
        prompt = self.prefixes[number % PREFIXES] + self.bench.prompt(SUFFIX)
        took_ms = await self.bench.first_token_ms(prompt, SECOND)
        return took_ms, self.target.moves.num_pulled > before

    def forget(self) -> None:
        """Nothing is cached on the second host any more."""
        core = self.bench.system.scheduler.core
        self.target.index.clear()
        core.planner.touch_all()

    async def case(self, megabits_per_s: float, rounds: int) -> Case:
        """One rate, of which the scheduler knows nothing at first."""
        self.hosts.limit(megabits_per_s)
        links = self.bench.system.scheduler.core.planner.pulls._links
        links.clear()
        case = Case(megabits_per_s, megabits_per_s / self.even_megabits_per_s())
        case.first_ms, _ = await self.first_token_ms(OWN, 0)
        for number in range(rounds):
            for place in range(len(CHOICES)):
                choice = CHOICES[(number + place) % len(CHOICES)]
                took_ms, pulled = await self.first_token_ms(choice, number)
                case.ms[choice].append(took_ms)
                if choice == OWN:
                    case.pulled.append(pulled)
            case.ms[CACHED].append((await self.first_token_ms(CACHED, number))[0])
        (link,) = [each for (_, target), each in links.items() if target == SECOND]
        case.seen_megabits_per_s = link.bytes_per_s * 8 / 1e6
        return case

    def even_megabits_per_s(self) -> float:
        """The rate at which the scheduler takes pulling and computing to take equally long."""
        per_token = self.target.block_bytes / self.target.block_size
        return per_token * self.target.prompt_rate.tokens_per_s * 8 / 1e6


@contextlib.asynccontextmanager
async def started(model: Path, folder: Path, tokens: int) -> AsyncIterator[Links]:
    """Two executors, of which the first has prefixes of so many tokens."""
    names, forced = Names("links"), Forced()
    with NetworkHosts(2) as hosts, hosts.redis(folder) as (near, far), forced.applied():
        options = {
            "name": "links",
            "kv_moves": "network",
            "max_num_seqs": 4,
            "cpu_kv_cache_gib": 0.4,
            "allow_open_redis": True,
        }
        system = System(model, partial(Curtain, near, set(), names), executors=0, **options)
        processes = ExecutorProcesses(
            system.settings, far, folder, 2, module="tests.system.far_executor", hosts=hosts.hosts
        )
        watch = Curtain(near, set(), names)
        bench = Bench(system, processes, set(), watch, 300, {})
        try:
            await watch.connect()
            await system.start()
            links = Links(bench, hosts, forced, [bench.prompt(tokens) for _ in range(PREFIXES)])
            await _prepare(links)
            yield links
        finally:
            processes.destroy()
            await system.vanish()
            await watch.close()


async def _prepare(links: Links) -> None:
    """Start the executors one after another, so that each measures its speed alone, and fill the first one's cache."""
    bench, replicas = links.bench, links.bench.system.scheduler.core.replicas
    for name in (FIRST, SECOND):
        bench.processes.start(name)
        await bench.until_ready(name)
        await bench.until(f"{name} has joined", lambda name=name: name in replicas)
    links.startup_tokens_per_s = links.target.prompt_rate.tokens_per_s
    for prefix in links.prefixes:
        await bench.first_token_ms(prefix, FIRST)
    links.forced.place = SECOND
    for number in range(WARM_UP):
        await links.first_token_ms(COMPUTE, number)
        await links.first_token_ms(PULL, number)


def head(links: Links, tokens: int) -> str:
    """What the table is of."""
    target = links.target
    per_token, rate = target.block_bytes / target.block_size, target.prompt_rate.tokens_per_s
    return (
        f"{tokens} tokens of {per_token / 1024:.0f} KiB; prompt tokens/s: {links.startup_tokens_per_s:.0f} by startup, "
        f"{rate:.0f} by {WARM_UP} prompts; even at {links.even_megabits_per_s():.0f} Mb/s\n"
        "    Mb/s  even   cached     pull  compute      own expected    first    link  pulled    more  within 5%"
    )


async def measure(asked: argparse.Namespace) -> int:
    """All rates; the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", "llama2", seed=1, **SHAPE)
        async with started(model, Path(folder), asked.tokens) as links:
            print(head(links, asked.tokens))
            right = True
            for number, is_factor in [(each, True) for each in asked.factors] + [(each, False) for each in asked.rates]:
                rate = number * links.even_megabits_per_s() if is_factor else number
                case = await links.case(rate, asked.rounds)
                right &= case.is_right
                print(case.line(), flush=True)
            print(f"in the end {links.target.prompt_rate.tokens_per_s:.0f} prompt tokens/s")
    return 0 if right else 1


def main() -> int:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of each prefix (default: 1024)")
    parser.add_argument("--rounds", type=int, default=9, help="prompts of each choice at each rate (default: 9)")
    parser.add_argument("--factors", type=float, nargs="*", default=FACTORS, help="rates, as parts of break-even")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="in Mb/s (default: 1000 10000)")
    asked = parser.parse_args()
    if (why := why_not()) is not None:
        print(f"nothing was measured: {why}")
        return 1
    logs.configure("warning", "text")
    return uvloop.run(measure(asked))


if __name__ == "__main__":
    sys.exit(main())
