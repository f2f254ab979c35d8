"""Stages of a pipeline die and freeze under 64 concurrent requests, and no client can tell.

``make chaos`` runs all of it; by default each stage is killed once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.chaos.deployment import Deployment
from tests.chaos.load import Load
from tests.chaos.test_chaos import Tell, busy, full, loaded, tell
from tests.system.faults.test_ranks import pids, rank_of, until_new

__all__ = ["tell"]  # a fixture

STAGES = (0, 1)
"""By rank: the last stage, which tells tokens, and the first."""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Load]]:
    """One actor of each kind, the executor of two stages."""
    yield from loaded(tmp_path_factory.mktemp("stages"), "--pipeline-parallel-size=2")


@pytest.mark.slow
async def test_each_stage_is_killed(stages: tuple[Deployment, Load], tell: Tell) -> None:
    """Both start anew, and answers go on with the same tokens."""
    deployment, load = stages
    async with busy(deployment, load, patience_s=150):
        for rank in STAGES:
            before = pids(deployment)
            assert len(before) == len(STAGES)
            rank_of(deployment, rank).kill()
            await until_new(deployment, before)
    tell(answers=load.answers, reconnects=load.reconnects)


@full
@pytest.mark.parametrize("rank", STAGES)
async def test_a_frozen_stage_ends_its_group(rank: int, stages: tuple[Deployment, Load], tell: Tell) -> None:
    """Its lease ends; the group is started anew, and the frozen process killed."""
    deployment, load = stages
    async with busy(deployment, load, patience_s=150):
        before = pids(deployment)
        rank_of(deployment, rank).send_signal(signal.SIGSTOP)
        await until_new(deployment, before)
    tell(answers=load.answers, reconnects=load.reconnects)


@full
async def test_each_rank_of_two_stages_of_two_ranks_is_killed(
    tmp_path_factory: pytest.TempPathFactory, tell: Tell
) -> None:
    """Whichever it is."""
    for deployment, load in loaded(
        tmp_path_factory.mktemp("wide"), "--pipeline-parallel-size=2", "--tensor-parallel-size=2"
    ):
        async with busy(deployment, load, patience_s=150):
            for rank in range(4):
                before = pids(deployment)
                rank_of(deployment, rank).kill()
                await until_new(deployment, before)
        tell(answers=load.answers, reconnects=load.reconnects)
