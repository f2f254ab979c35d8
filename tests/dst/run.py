"""One seed: a world, its faults, its clients, and what came of it."""

from __future__ import annotations

import asyncio
import atexit
import gc
import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pagebus.actors.runtime.actor import describe
from pagebus.actors.settings import Settings
from tests.chaos.load import Job
from tests.dst.checker import until_clean
from tests.dst.clients import Clients, simple_jobs
from tests.dst.engine import Machine, with_pulls, with_windows
from tests.dst.loop import START_S, SimulatedLoop, Stuck
from tests.dst.nemesis import Nemesis
from tests.dst.oracles.drafts import with_drafts
from tests.dst.queued import Queued
from tests.dst.seams import WallClock, sealed
from tests.dst.world import World
from tests.helpers.oracle import make_oracle

NUM_JOBS = 24
LEASE_TTL_S = 2.0
RESUME_TIMEOUT_S = 8.0
PATIENCE_S = 300.0
"""How long clients may wait, and things may be left over, once there are no more faults."""
MAX_MODEL_LEN = 256
KINDS = ("ingress", "tokenizer", "scheduler", "executor", "detokenizer", "jobs")


@dataclass
class Outcome:
    """What a seed came to. ``log`` tells the story."""

    seed: int
    problems: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    digest: int = 0
    turns: int = 0
    virtual_s: float = 0.0
    answers: int = 0
    jobs: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    windowed_pages: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    roles: str | None = None
    num_pulls: int = 0
    num_failed_pulls: int = 0


@cache
def model() -> str:
    folder = Path(tempfile.mkdtemp(prefix="pagebus-oracle-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(make_oracle(folder / "model", max_model_len=MAX_MODEL_LEN))


@cache
def jobs() -> list[Job]:
    return simple_jobs(NUM_JOBS)


def settings(rng: random.Random) -> Settings:
    return Settings(
        model=model(), load_format="dummy", served_model_name=("oracle",), device="cpu", threads=1,
        lease_ttl_s=LEASE_TTL_S, resume_timeout_s=RESUME_TIMEOUT_S, drain_timeout_s=5.0,
        max_num_seqs=rng.choice((2, 4, 8)), max_num_batched_tokens=rng.choice((32, 64)),
        pipeline_depth=rng.choice((1, 2, 3)), preemption_mode=rng.choice(("auto", "recompute", "swap")),
    )  # fmt: skip


def with_roles(settings: Settings, counts: dict[str, int], rng: random.Random) -> Settings:
    """The settings for executors that pull: two or three, in half of the cases with roles, in a quarter with roles that
    change."""
    counts["executor"] = count = rng.choice((2, 2, 3))
    prefill = rng.randint(1, count - 1)
    roles = f"prefill={prefill},decode={count - prefill}" if rng.random() < 0.5 else rng.choice((None, "auto"))
    return settings.replace(executors=count, roles=roles)


@cache
def expected() -> list[dict[int, tuple[Any, ...]]]:
    """What the oracle says to each job, alone and undisturbed."""
    told: list[dict[int, tuple[Any, ...]]] = []

    async def learn(world: World, clients: Clients, wall: WallClock, outcome: Outcome) -> None:
        async with clients.session() as session:
            for job in clients.jobs:
                told.append((await clients.ask(session, job, key=None, streamed=False)).told())

    outcome = simulate(-1, learn, jobs())
    assert not outcome.problems, outcome.problems
    return told


Story = Callable[[World, Clients, WallClock, Outcome], Awaitable[None]]


def simulate(seed: int, story: Story, chosen: list[Job], *, patience_s: float = PATIENCE_S) -> Outcome:
    """Run a story in a world of its own."""
    rng = random.Random(seed)
    outcome = Outcome(seed)
    loop = SimulatedLoop(rng)
    machine = Machine(rng, num_blocks=rng.choice((16, 24, 64)), num_host_blocks=rng.choice((0, 0, 16)))
    machine = with_windows(machine, random.Random(f"windows of {seed}"))
    machine = with_drafts(machine, random.Random(f"drafts of {seed}"))
    pulls_rng = random.Random(f"pulls of {seed}")
    machine = with_pulls(machine, pulls_rng)
    outcome.windowed_pages, outcome.num_drafts = machine.windowed_pages, machine.num_drafts

    def tell(text: str) -> None:
        outcome.log.append(f"{loop.now_s - START_S:10.5f} {text}")

    with sealed(loop, rng, machine, model(), tell) as wall:
        counts = {kind: rng.choice((1, 2)) for kind in KINDS}
        gc.disable()  # what it finds may have connections to close: when it does would be chance
        try:
            asyncio.set_event_loop(loop)
            chosen_settings = settings(rng)
            if machine.links is not None:
                chosen_settings = with_roles(chosen_settings, counts, pulls_rng)
            outcome.roles = chosen_settings.roles
            world = World(loop, rng, chosen_settings, counts, tell, machine.links)
            clients = Clients(loop, chosen, rng, tell)

            async def live() -> None:
                world.start()
                await story(world, clients, wall, outcome)
                if not world.problems and not clients.problems:
                    await until_clean(world, patience_s)
                await world.stop()

            loop.run_until_complete(live())
            left = [task.get_name() for task in asyncio.all_tasks(loop)]
            world.problems += [f"task left over: {name}" for name in left]
        except Stuck as error:
            world.problems.append(str(error))
        finally:
            asyncio.set_event_loop(None)
            loop.close()
            gc.enable()
    outcome.problems = [*clients.problems, *world.problems]
    outcome.digest, outcome.turns, outcome.virtual_s = loop.digest, loop.turns, loop.now_s - START_S
    outcome.answers, outcome.num_accepted = clients.answers, sum(machine.accepted)
    if machine.links is not None:
        outcome.num_pulls, outcome.num_failed_pulls = machine.links.num_there, machine.links.num_failed
    return outcome


def run_seed(seed: int, only: tuple[str, str] | None = None, patience_s: float = PATIENCE_S) -> Outcome:
    """Faults for a while, then none; every client must have its answer, and nothing may be left. ``only``: one kind of
    fault, for one kind of actor."""
    known = expected()
    rng = random.Random(seed)
    places = rng.sample(range(NUM_JOBS), rng.randint(3, 10))
    if random.Random(f"twins of {seed}").random() < 0.5:
        places += places  # who asks at the same time wants blocks that are just being computed
    queued_places = rng.sample(range(NUM_JOBS), rng.choice((0, 3, 6)))

    async def story(world: World, clients: Clients, wall: WallClock, outcome: Outcome) -> None:
        clients.expected = [known[place] for place in places]
        queued = Queued(
            world, [jobs()[place] for place in queued_places], [known[place] for place in queued_places],
            world.rng, world.tell,
        )  # fmt: skip
        nemesis = Nemesis(world, wall, world.rng, only)
        for_s = world.rng.choice((3.0, 8.0, 15.0))
        asking = asyncio.create_task(
            clients.ask_all(
                turns=world.rng.choice((1, 2) if world.links is None else (2, 3)),
                keyed=0.5 if nemesis.spares_ingresses else 1.0,
                spread_s=for_s / 2,
                leaves=world.rng.choice((0.0, 0.2)),
            )
        )
        pushing = asyncio.create_task(queued.ask_all(spread_s=for_s / 2, cancels=world.rng.random() < 0.3))
        await nemesis.run(for_s)
        world.heal()
        until_s, both = world.loop.time() + patience_s, (asking, pushing)
        while not (asking.done() and pushing.done()) and not (world.problems or clients.problems or queued.problems):
            if world.loop.time() > until_s:
                told = f"jobs wait for ever: {queued.waiting}" if asking.done() else "clients wait for ever"
                clients.problems.append(told)
            await asyncio.wait(both, timeout=1.0)
        for task in both:
            task.cancel()
        ends = await asyncio.gather(*both, return_exceptions=True)
        clients.problems += queued.problems + [describe(end) for end in ends if isinstance(end, Exception)]
        outcome.faults, outcome.jobs = nemesis.done, queued.answers

    return simulate(seed, story, [jobs()[place] for place in places], patience_s=patience_s)
