"""Ranks of an executor die, freeze and come back under 64 concurrent requests, and no client can tell.

``make chaos`` runs all of it; by default one rank is killed.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.chaos.deployment import Deployment
from tests.chaos.load import Load
from tests.chaos.test_chaos import FROZEN_S, Tell, busy, full, loaded, measured, tell

__all__ = ["tell"]  # a fixture

RANKS = (0, 1)
LOSSES = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Load]]:
    """One actor of each kind, the executor of two ranks."""
    yield from loaded(tmp_path_factory.mktemp("ranks"), "--tensor-parallel-size=2")


def ranks_of(deployment: Deployment) -> dict[str, psutil.Process]:
    """The ranks that run, by name, in their order."""
    return {name: child for name, child in sorted(deployment.actors().items()) if name.startswith("executor-")}


def rank_of(deployment: Deployment, rank: int) -> psutil.Process:
    """One of the ranks, all of which run."""
    return list(ranks_of(deployment).values())[rank]


def pids(deployment: Deployment) -> dict[str, int]:
    """Of all ranks that run."""
    return {name: child.pid for name, child in ranks_of(deployment).items()}


async def until_new(deployment: Deployment, before: dict[str, int]) -> None:
    """Until both ranks are others, and ready."""
    while pids(deployment).items() & before.items():  # noqa: ASYNC110 (processes tell nobody)
        await asyncio.sleep(0.05)
    await asyncio.to_thread(deployment.until_ready, min(before))


@pytest.mark.slow
async def test_a_rank_is_killed(ranks: tuple[Deployment, Load], tell: Tell) -> None:
    """Both start anew, and answers go on with the same tokens."""
    deployment, load = ranks
    before = pids(deployment)
    assert len(before) == len(RANKS)
    async with busy(deployment, load):
        rank_of(deployment, 1).kill()
        await until_new(deployment, before)
    tell(answers=load.answers, reconnects=load.reconnects)


@full
@pytest.mark.parametrize("rank", RANKS)
async def test_a_rank_is_killed_again_and_again(rank: int, ranks: tuple[Deployment, Load], tell: Tell) -> None:
    """Each time when the group has just become ready."""
    deployment, load = ranks
    async with busy(deployment, load, patience_s=150):
        for _ in range(LOSSES):
            before, fault_s = pids(deployment), time.monotonic()
            rank_of(deployment, rank).kill()
            await until_new(deployment, before)
    tell(**measured(load, fault_s))


@full
@pytest.mark.parametrize("rank", RANKS)
async def test_a_frozen_rank_ends_its_group(rank: int, ranks: tuple[Deployment, Load], tell: Tell) -> None:
    """Its lease ends; the group is started anew, and the frozen process killed."""
    deployment, load = ranks
    async with busy(deployment, load, patience_s=150):
        before = pids(deployment)
        rank_of(deployment, rank).send_signal(signal.SIGSTOP)
        await until_new(deployment, before)
    tell(answers=load.answers, reconnects=load.reconnects)


@full
async def test_all_ranks_freeze_and_come_back(ranks: tuple[Deployment, Load], tell: Tell) -> None:
    """For twice the time of a lease: whether others took over or not, it does no harm."""
    deployment, load = ranks
    async with busy(deployment, load, patience_s=150):
        processes = list(ranks_of(deployment).values())
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(FROZEN_S)
        for process in processes:
            process.send_signal(signal.SIGCONT)
    tell(answers=load.answers, reconnects=load.reconnects)


@full
async def test_redis_is_killed_under_ranks(ranks: tuple[Deployment, Load], tell: Tell) -> None:
    """Ranks may have read different plans when it goes."""
    deployment, load = ranks
    async with busy(deployment, load, patience_s=150):
        for _ in range(LOSSES):
            deployment.kill_redis()
            await asyncio.to_thread(deployment.start_redis)
            await asyncio.sleep(3)
    tell(answers=load.answers, reconnects=load.reconnects)
