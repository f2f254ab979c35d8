"""SIGKILL while blocks move between executors, over a real Redis: no token is lost or changed, and no block
stays in use. ``make chaos`` does the same under load.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Any

import psutil
import pytest

from pagebus.bus.contract import START
from pagebus.bus.streams import Names
from tests.chaos.deployment import Deployment
from tests.chaos.load import Load
from tests.chaos.test_chaos import FULL, Tell, busy, full, loaded, tell
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate
from tests.helpers.waiting import LIMIT_S, eventually, until
from tests.system.curtain import Curtain
from tests.system.executor_processes import ExecutorProcesses
from tests.system.harness import System, running

pytestmark = pytest.mark.share(16)

__all__ = ["tell"]  # a fixture

CONFIG = REFERENCE_CONFIGS[0]
LENDER, BORROWER = "executor-0", "executor-1"
SLOTS, COUNT, LONG = 2, 12, 400
PREFIX = 20 * 16
NUM_BLOCKS = 80
"""Of a device, where the prefix is to be displaced."""
MOMENTS_S = (0.05, 0.15, 0.25, 0.35, 0.6)
"""From the beginning of a drain to the kill. The scheduler sees a drain within 0.25 s."""
Case = tuple[list[list[int]], list[list[int]]]
"""Prompts, of the long sequences first, and their tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("moving") / "model", CONFIG)


@pytest.fixture(scope="module")
def case(model: Path) -> Case:
    """Two long sequences, and one whose prefix moves."""
    rng = random.Random(3)
    prompts = [[rng.randrange(CONFIG.vocab_size) for _ in range(length)] for length in (40, 17, PREFIX + 7)]
    return prompts, reference_generate(model, prompts[:SLOTS], LONG) + reference_generate(model, prompts[SLOTS:], COUNT)


KILLS = [("host", "device", LENDER), ("host", "host-tier", BORROWER), ("network", "device", BORROWER),
         ("network", "host-tier", LENDER)]  # fmt: skip
"""How far apart both are, where the lender has what is pulled, and who is killed: every two of these together."""
if FULL:
    KILLS = list(itertools.product(("host", "network"), ("device", "host-tier"), (LENDER, BORROWER)))


RANK_KILLS = [("host", f"{BORROWER}.1")]
"""The same of one rank of two."""
if FULL:
    RANK_KILLS = list(itertools.product(("host", "network"), (LENDER, f"{LENDER}.1", BORROWER, f"{BORROWER}.1")))


class Moving:
    """A system with two executors that are processes, and a pull between them that cannot come to its end."""

    def __init__(self, system: System, processes: ExecutorProcesses, hidden: set[str], case: Case) -> None:
        self.system, self.processes, self._hidden = system, processes, hidden
        self._prompts, self._expected = case
        self._asked: list[Any] = []

    async def displace(self) -> None:
        """What has been computed is in the lender's host tier alone."""
        core, rng = self.system.scheduler.core, random.Random(4)
        lender = core.replicas[LENDER]
        wanted = set(lender.index.blocks)
        fillers = [
            [rng.randrange(CONFIG.vocab_size) for _ in range(PREFIX)] for _ in range(NUM_BLOCKS * 16 // PREFIX + 1)
        ]
        await self.system.generate(fillers, max_tokens=1)
        assert not wanted & set(lender.index.blocks)
        assert wanted <= set(lender.host_tier.pool.index.blocks)

    async def begin(self, *, far: bool, on_host: bool) -> None:
        """The lender is full and stands still, and so does the borrower if it could read without the lender's help."""
        system, core = self.system, self.system.scheduler.core
        await until(lambda: LENDER in core.replicas)
        await system.generate([self._prompts[-1][:PREFIX]], max_tokens=1)
        if on_host:
            await self.displace()
        self._asked = [system.submit(each, max_tokens=LONG)[1] for each in self._prompts[:SLOTS]]
        await until(lambda: sum(map(len, system.collector.tokens.values())) > 2 * SLOTS)
        self._send_all(LENDER, SIGSTOP)
        self._hidden.clear()
        await until(lambda: BORROWER in core.replicas)
        assert core.num_running == SLOTS
        if not far:
            self._send_all(BORROWER, SIGSTOP)
        self._asked.append(system.submit(self._prompts[-1], max_tokens=COUNT)[1])
        await until(lambda: core.planner.pulls.lent(core.replicas[LENDER]))
        await eventually(self._is_ordered)

    async def _is_ordered(self) -> bool:
        """Whether the borrower has ever had a plan: its first one is that with the pull."""
        return await self.system.bus.last_id(self.system.names.steps(BORROWER)) != START

    def _send_all(self, name: str, number: Signals) -> None:
        """A signal to all ranks of an executor."""
        for each in self.processes.ranks_of(name):
            self.processes.send(each, number)

    async def kill(self, victim: str) -> None:
        """SIGKILL; as a supervisor does, start it again, with all ranks of its group. The other one goes on."""
        ranks = self.processes.ranks_of(victim)
        for name in (victim, *ranks):
            self.processes.send(name, SIGKILL)
            await self.processes.until_ended(name)
        for lease in await self.system.bus.leases():
            if lease.name in ranks:
                await self.system.bus.release_lease(lease.kind, lease.name, lease.epoch)
        for name in ranks:
            self.processes.start(name)
        for name in self.processes.names:
            if name not in ranks:
                self.processes.send(name, SIGCONT)

    async def replace_scheduler(self) -> None:
        """SIGKILL, nearly; another takes over at once. The executors go on."""
        (lease,) = await self.system.bus.leases("scheduler")
        await self.system.replace_scheduler()
        await self.system.bus.release_lease("scheduler", lease.name, lease.epoch)
        for name in (LENDER, BORROWER):
            self.processes.send(name, SIGCONT)

    async def end(self) -> None:
        """All have their tokens."""
        assert [await each for each in self._asked] == self._expected


@contextlib.asynccontextmanager
async def under_way(
    model: Path, case: Case, tmp_path: Path, redis_url: str, names: Names, *, far: bool, on_host: bool = False,
    ranks: int = 1,
) -> AsyncIterator[Moving]:  # fmt: skip
    """Over shared memory the borrower has its order, over the network it waits for the lender's bytes. In the end all
    tokens are there, and nothing else is."""
    hidden = {BORROWER}
    options = {"name": names.deployment, "max_num_seqs": SLOTS, "kv_moves": "network" if far else "host"}
    options |= {"lease_ttl_s": 60.0, "cpu_kv_cache_gib": 0.05, "swap_space": 0.0, "tensor_parallel_size": ranks}
    if on_host:
        options |= {"num_gpu_blocks_override": NUM_BLOCKS, "swap_space": 0.05, "preemption_mode": "swap"}
    async with running(model, lambda: Curtain(redis_url, hidden, names), executors=0, **options) as system:
        module = "tests.system.far_executor" if far else ""
        processes = ExecutorProcesses(system.settings, redis_url, tmp_path, 2, module=module)
        try:
            for name in processes.names:
                processes.start(name)
            moving = Moving(system, processes, hidden, case)
            await moving.begin(far=far, on_host=on_host)
            yield moving
            await moving.end()
            await system.until_clean()
        finally:
            processes.destroy()


@pytest.mark.parametrize(("way", "tier", "victim"), KILLS)
async def test_a_kill_under_a_pull(
    model: Path, case: Case, tmp_path: Path, redis_url: str, redis_names: Names, way: str, tier: str, victim: str
) -> None:
    """What was to be pulled is computed, be it by whoever comes in the victim's place."""
    where = {"far": way == "network", "on_host": tier == "host-tier"}
    async with under_way(model, case, tmp_path, redis_url, redis_names, **where) as moving:
        replicas = dict(moving.system.scheduler.core.replicas)
        await moving.kill(victim)
    assert replicas[BORROWER].moves.num_pulled == 0
    if victim == LENDER:  # whoever comes in a borrower's place may be there soon enough to pull the same anew
        assert replicas[BORROWER].moves.num_failed == PREFIX // 16
        assert replicas[LENDER].moves.num_lent == 0


@pytest.mark.slow
@pytest.mark.parametrize(("way", "victim"), RANK_KILLS)
async def test_a_kill_of_a_rank_under_a_pull(
    model: Path, case: Case, tmp_path: Path, redis_url: str, redis_names: Names, way: str, victim: str
) -> None:
    """Its group starts anew; what was to be pulled is computed, or pulled anew."""
    async with under_way(model, case, tmp_path, redis_url, redis_names, far=way == "network", ranks=2) as moving:
        replicas = dict(moving.system.scheduler.core.replicas)
        await moving.kill(victim)
    assert replicas[BORROWER].moves.num_pulled == 0
    if victim.startswith(LENDER):
        assert replicas[LENDER].moves.num_lent == 0


async def test_another_scheduler_under_a_pull(
    model: Path, case: Case, tmp_path: Path, redis_url: str, redis_names: Names
) -> None:
    """It knows nothing of the pull, whose blocks it may give to others."""
    async with under_way(model, case, tmp_path, redis_url, redis_names, far=True) as moving:
        await moving.replace_scheduler()


# -- under load --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Load]]:
    """Two executors, and one actor of each other kind."""
    yield from loaded(tmp_path_factory.mktemp("double"), "--executors=2")


@full
@pytest.mark.parametrize("victim", ["lender", "borrower"])
async def test_kills_while_an_executor_drains(double: tuple[Deployment, Load], victim: str, tell: Tell) -> None:
    """What the one that drains has given away pulls its blocks, or computes them where either is killed."""
    deployment, load = double
    async with busy(deployment, load, patience_s=150):
        for turn, moment_s in enumerate(MOMENTS_S):
            before = {name: child for name, child in deployment.actors().items() if name.startswith("executor")}
            lender, borrower = sorted(before, reverse=turn % 2 == 1)
            before[lender].terminate()
            await asyncio.sleep(moment_s)
            killed = lender if victim == "lender" else borrower
            with contextlib.suppress(psutil.NoSuchProcess):
                before[killed].kill()
            for name in {lender, killed}:
                await until_another(deployment, before[name], name)
    moved = await asyncio.to_thread(pulled, deployment)
    assert moved
    tell(answers=load.answers, reconnects=load.reconnects, blocks_pulled_so_far=moved)


async def until_another(deployment: Deployment, before: psutil.Process, name: str) -> None:
    """Until the actor of this name is another process, and ready."""
    while deployment.actors().get(name) in (before, None):  # noqa: ASYNC110 (processes tell nobody)
        await asyncio.sleep(0.05)
    await asyncio.to_thread(deployment.until_ready, name)


def pulled(deployment: Deployment) -> float:
    """Blocks, by all executors so far."""
    with urllib.request.urlopen(f"{deployment.url}/metrics", timeout=LIMIT_S) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("pagebus:pulled_blocks_total"))
