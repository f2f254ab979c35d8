"""Blocks that move between executors: the pulls that plans order, and the reports about them."""

from __future__ import annotations

from msgspec.structs import replace

from pagebus.bus.messages.record import Record

PATIENCE_S = 10.0
"""How long sequences wait for a pull, and executors try it. Its blocks stay held until the executor has reported."""


class BlockPull(Record, frozen=True, kw_only=True):
    """Copy blocks from another executor's cache. The next ``num_blocks`` entries of the plan's ``pull_sources`` and
    ``pull_blocks`` belong to this pull.

    ``address`` is the ``kv_address`` of the source's lease. Both executors have the same ``kv_kind``. If they are
    groups of ranks, the address covers all ranks, and each rank copies its part of the blocks.
    """

    pull: int
    """Its number, counted by the scheduler."""
    address: str
    num_blocks: int
    hosts: bool = False
    """The sources are blocks of a host tier: that of the other executor, or one's own."""
    at_once: bool = False
    """The pull may begin before earlier plans are done, because none of them uses the target's blocks."""


class PullReport(Record, frozen=True, kw_only=True):
    """Executor -> scheduler, over ``control``: the blocks of a pull are ``there``, for plans written from now on. If
    they are not, their content is undefined, and nothing writes to them any more. Each ``rank`` of the executor's
    ``ranks`` reports on its part of the blocks."""

    replica: str
    executor_epoch: int
    scheduler_epoch: int
    pull: int
    there: bool
    bytes_per_s: float = 0.0
    """How fast they were copied; 0 if they were not."""
    error: str = ""
    """Why they are not there."""
    ended_s: float = 0.0
    """Wall clock time at which they were there, or were given up; 0: unknown."""
    rank: int = 0
    ranks: int = 1
    promised: bool = False
    """The copy is not done, and its source is still being read. But plans written from now on may use the blocks: the
    executor finishes the copy first. A second report follows when it is done. If the copy fails, the executor ends
    without a result that was computed with the blocks."""


def combine_reports(told: dict[int, PullReport], report: PullReport) -> PullReport | None:
    """Store a rank's report in ``told``, by rank. Returns the report of all together once every rank has sent one: the
    blocks are there if all parts are. A repeated report changes nothing."""
    told[report.rank] = report
    if len(told) < report.ranks or report.ranks == 1:
        return report if report.ranks == 1 else None
    failed = [each for _, each in sorted(told.items()) if not each.there]
    return replace(
        report, rank=0, ranks=1, there=not failed, error=f"rank {failed[0].rank}: {failed[0].error}" if failed else "",
        bytes_per_s=0.0 if failed else min(each.bytes_per_s for each in told.values()),
        ended_s=max(each.ended_s for each in told.values()),
    )  # fmt: skip
