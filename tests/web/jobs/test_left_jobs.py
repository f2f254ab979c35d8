"""What a jobs actor says and counts of jobs that it does not finish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagebus.actors.telemetry.metrics import render
from pagebus.bus.messages import Job
from pagebus.web.jobs.actor import JobsActor
from tests.helpers.waiting import until
from tests.web.jobs.test_jobs_actor import World, line, world  # noqa: F401

ABORTED = 'vllm:request_success_total{finished_reason="abort"} '


def aborts(actor: JobsActor) -> list[str]:
    lines = render([actor.metrics.snapshot()]).splitlines()
    return [line.removeprefix(ABORTED) for line in lines if line.startswith(ABORTED)]


@pytest.mark.parametrize("world", ["memory"], indirect=True)
async def test_jobs_that_are_left_to_others_are_not_aborted(
    world: World,  # noqa: F811
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    """An actor that stops says that they go on, and counts no end of them; of a cancelled batch it does."""
    world.backend.answers = False
    actor = await world.begin()
    await world.push(Job(request=line("a"), batch="night"), Job(request=line("b")))
    left = (await world.backend.requested(2))[1].request_id
    await world.bus.count({world.names.batch("night"): {"cancel": 1}}, ttl_s=60)
    await world.results(1)
    cancelled = (await world.backend.aborted(1))[0]
    actor.request_drain()
    await world.actors.pop("jobs-0")[1]
    await actor.bus.close()
    await until(lambda: world.backend.left == [left])
    ends = [(each["event"], each["request_id"]) for each in lines() if each["event"] in ("aborted", "left running")]
    assert ends == [("aborted", cancelled), ("left running", left)]
    assert aborts(actor) == ["1.0"]
