"""Pulls in recordings: who lent which blocks to whom, when, and what became of it, also if a report was missed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from pagebus.actors.simulator.recording.pulls import MOST_EARLY, PullLog
from pagebus.actors.simulator.recording.record import Follower, Recording
from pagebus.actors.simulator.recording.recorded import Tables, read_rows, read_run
from pagebus.actors.simulator.recording.trace import make_trace, read_trace
from pagebus.actors.simulator.report import make_report
from pagebus.actors.simulator.watch import StepLog
from pagebus.bus.contract import Entry, EntryId
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import BlockPull, Message, PullReport, ReplicaFenced, StepPlan
from pagebus.bus.streams import Names
from tests.actors.scheduler.moves.test_pulls import LONG, Pair
from tests.actors.scheduler.world import request
from tests.actors.simulator.test_moves import deployed

NAMES = Names("test")
LENDERS = {"there": "gpu-0"}


def order(number: int, *blocks: int, step: int = 1, planned_s: float = 10.0, **columns: Any) -> StepPlan:
    """Blocks from 100 on are pulled into these."""
    pulls = (BlockPull(pull=number, address="there", num_blocks=len(blocks)),) if blocks else ()
    sources = np.arange(100, 100 + len(blocks), dtype=np.int32)
    into = np.array(blocks, np.int32)
    return StepPlan(
        step=step, planned_s=planned_s, num_decodes=0, pulls=pulls, pull_sources=sources, pull_blocks=into, **columns
    )


def report(number: int, *, there: bool = True, epoch: int = 1, ended_s: float = 10.5) -> PullReport:
    error = "" if there else "no way"
    return PullReport(
        replica="gpu-1", executor_epoch=3, scheduler_epoch=epoch, pull=number, there=there, error=error, ended_s=ended_s
    )


class Log:
    """What is written of pulls into gpu-1, in seconds after 8."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.pulls = PullLog(self.rows.append, 8.0, dict(LENDERS))

    def take(self, *messages: StepPlan | PullReport, epoch: int = 1) -> list[dict[str, Any]]:
        """The rows that were written meanwhile."""
        before = len(self.rows)
        for message in messages:
            if isinstance(message, StepPlan):
                self.pulls.plan("gpu-1", epoch, message)
            else:
                self.pulls.report(message)
        return self.rows[before:]


ROW = {"pull": 7, "replica": "gpu-1", "lender": "gpu-0", "ordered_s": 2.0, "sources": [100, 101], "blocks": [4, 5]}


def test_a_promised_pull_ends_with_its_second_report() -> None:
    """The plan between the two has its blocks."""
    log, named = Log(), order(9, new_block_ids=np.array([4, 5], np.int32))
    log.take(order(7, 4, 5))
    assert log.take(replace(report(7, ended_s=10.4), promised=True), named) == []
    assert log.take(report(7)) == [ROW | {"ended_s": 2.5, "there": True}]


def test_a_pull_is_a_row_once_it_has_ended() -> None:
    log = Log()
    assert log.take(order(7, 4, 5)) == []
    assert log.take(report(7)) == [ROW | {"ended_s": 2.5, "there": True}]
    log.take(order(8, 6))
    (failed,) = log.take(report(8, there=False))
    assert (failed["there"], failed["error"]) == (False, "no way")
    assert log.pulls.num_pulls == 2


def test_a_pull_of_ranks_ends_with_the_last_of_them() -> None:
    """Also if they were sooner than the plan."""
    first, last = (replace(report(7, ended_s=10.5 - rank), rank=rank, ranks=2) for rank in (0, 1))
    log = Log()
    assert log.take(order(7, 4, 5), first) == []
    assert log.take(last) == [ROW | {"ended_s": 2.5, "there": True}]
    log = Log()
    assert log.take(last, first) == []
    assert log.take(order(7, 4, 5)) == [ROW | {"ended_s": 2.5, "there": True}]


def test_a_pull_out_of_a_host_tier_says_so() -> None:
    """Its sources are numbered as that one's."""
    log, pulls = Log(), (BlockPull(pull=7, address="there", num_blocks=2, hosts=True),)
    plan = replace(order(7, 4, 5), pulls=pulls)
    assert log.take(plan, report(7)) == [{**ROW, "hosts": True, "ended_s": 2.5, "there": True}]


def test_several_pulls_of_one_plan_have_their_own_blocks() -> None:
    log = Log()
    pulls = (BlockPull(pull=1, address="there", num_blocks=2), BlockPull(pull=2, address="elsewhere", num_blocks=1))
    sources, blocks = np.array([9, 8, 7], np.int32), np.array([1, 2, 3], np.int32)
    plan = StepPlan(step=1, planned_s=10.0, num_decodes=0, pulls=pulls, pull_sources=sources, pull_blocks=blocks)
    rows = log.take(plan, report(2), report(1))
    assert [(row["lender"], row["sources"], row["blocks"]) for row in rows] == [
        ("", [7], [3]), ("gpu-0", [9, 8], [1, 2]),
    ]  # fmt: skip


def test_a_report_that_is_read_before_its_plan_counts() -> None:
    """They are in different streams. Those whose plan never comes are forgotten."""
    log = Log()
    assert log.take(report(7)) == []
    assert log.take(order(7, 4, 5)) == [ROW | {"ended_s": 2.5, "there": True}]
    log.take(report(7, epoch=2), *(report(number, epoch=3) for number in range(MOST_EARLY)))
    assert log.take(order(7, 4, 5), epoch=2) == []


def test_a_report_that_was_missed_shows_in_the_next_plan_that_has_the_blocks() -> None:
    """They may have come or not: nobody knows."""
    log = Log()
    log.take(order(7, 4, 5))
    other, its = np.array([9], np.int32), np.array([5], np.int32)
    assert log.take(order(0, appended_blocks=other, appended_slots=other, step=2, planned_s=11.0)) == []
    assert log.take(order(0, new_block_ids=its, step=3, planned_s=12.0)) == [ROW | {"ended_s": 4.0}]
    assert log.take(report(7)) == []


def test_what_nobody_reports_any_more() -> None:
    """Of a scheduler before this one, and of an executor that is gone; an old executor does not say when it was."""
    log = Log()
    log.take(order(7, 4, 5))
    (abandoned,) = log.take(order(7, 4, 5, planned_s=13.0), epoch=2)
    assert (abandoned["ended_s"], abandoned["there"]) == (5.0, False)
    log.pulls.lose("gpu-0")
    log.pulls.lose("gpu-1")
    assert (log.rows[-1]["ordered_s"], log.rows[-1]["there"]) == (5.0, False)
    log.take(order(8, 4), order(9, 6), report(8, ended_s=0.0))
    log.pulls.finish()
    assert [(row["pull"], row.get("ended_s")) for row in log.rows[-2:]] == [(8, 5.0), (9, None)]
    log.pulls.finish()
    assert log.pulls.num_pulls == 4


def test_the_scheduler_s_own_plans_and_reports_are_recorded() -> None:
    """Both replicas' blocks are those that the scheduler's books have; a fence ends what is under way."""
    pair, out = Pair(), io.StringIO()
    recording = Recording(out, NAMES, 0.0, 4, lenders={pair.lender.pulls.address: "gpu-0"})

    def take(stream: str, message: Message) -> None:
        recording.take(Entry(stream, EntryId(pair.world.config.epoch, 1), message))

    pair.occupy()
    pair.world.send(request("second", LONG, max_tokens=3))
    (pull,) = pair.world.core.planner.pulls._live.values()
    sources, blocks = list(pull.sources), list(pull.blocks)
    pair.world.step("gpu-1")
    for name, plan in pair.world.plans:
        take(NAMES.steps(name), plan)
    take(NAMES.control, pair.target.pulls.pull_one())
    take(NAMES.results("gpu-1"), ReplicaFenced(replica="gpu-1", reason="gone"))
    (row,) = [row for row in map(json.loads, out.getvalue().splitlines()) if "pull" in row]
    assert (row["sources"], row["blocks"], row["there"]) == (sources, blocks, True)
    assert (row["lender"], row["replica"]) == ("gpu-0", "gpu-1")


async def test_reports_are_read_before_plans_and_lenders_have_names() -> None:
    """Who has joined the group of ``control`` still gets them."""
    bus = MemoryBus(MemoryServer(), NAMES)
    await bus.connect()
    await bus.acquire_lease("executor", "gpu-1", {"block_size": 4, "kv_address": "there"}, ttl_s=60)
    await bus.create_group(NAMES.control, "schedulers")
    follower = Follower(bus, NAMES)
    await follower.read(0)
    await bus.publish([(NAMES.control, report(7))])
    (entry,) = await follower.read(0)
    assert isinstance(entry.message, PullReport)
    assert follower.lenders["there"] == "gpu-1"
    assert len(await bus.read_group("schedulers", "leader", [NAMES.control], block_ms=0)) == 1
    await bus.close()


def test_a_simulated_run_with_pulls_can_be_read_and_simulated(tmp_path: Path) -> None:
    """All blocks that were pulled are in it, and what failed. Another simulation decides anew."""
    trace, faults = make_trace([8192] * 8, [300] * 8), "drain executor-0 at 1.5; kill executor-0 at 1.53"
    deployment, path = deployed(trace, 100.0, faults=faults, num_gpu_blocks_override=6000), tmp_path / "run.jsonl"
    with path.open("w") as out:
        log = StepLog(deployment, out)
        deployment.watch(log)
        deployment.run()
        log.finish()
    moves = make_report(deployment)["moves"]
    rows = [row for row in read_rows(path) if "pull" in row]
    for there, name in ((True, "pulled_blocks"), (False, "failed_blocks")):
        assert sum(len(row["blocks"]) for row in rows if row["there"] is there) == moves[name] > 0
    assert {(row["lender"], row["replica"]) for row in rows} == {("executor-0", "executor-1")}
    assert all(row["ordered_s"] < row["ended_s"] for row in rows)
    assert len(read_trace(path)) == 8


def test_pulled_blocks_are_cached_in_pictures(tmp_path: Path) -> None:
    """As soon as they have come, and not those of others or those that have not."""
    step = {"replica": "gpu-1", "planned_s": 0, "decodes": 1, "prefill_tokens": 0}
    pull = {"replica": "gpu-1", "lender": "gpu-0", "ordered_s": 0, "ended_s": 1.5, "there": True}
    rows: list[dict[str, Any]] = [{"pagebus_trace": 1, "num_blocks": 9}]
    rows += [step | {"step": number, "done_s": number} for number in (1, 2, 3)]
    rows += [pull | {"pull": 1, "blocks": [1, 2]}, pull | {"pull": 2, "blocks": [3], "there": False}]
    rows += [pull | {"pull": 3, "blocks": [4], "replica": "gpu-0"}, pull | {"pull": 4, "blocks": [5], "ended_s": 9}]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, tables = read_run(path, "gpu-1")
    assert run.listed == [0, 2, 2]
    assert isinstance(tables, Tables)
    assert tables.used == {1, 2}
