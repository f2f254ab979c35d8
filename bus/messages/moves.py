"""Blocks that move between executors: what a plan pulls from another's cache, and what has become of it."""

from __future__ import annotations

from msgspec.structs import replace

from pagebus.bus.messages.record import Record

PATIENCE_S = 10.0
"""Nobody waits for a pull longer than that, and no executor goes on with it. What it holds stays its own until its
executor has said what became of it."""


class BlockPull(Record, frozen=True, kw_only=True):
    """Copy blocks of another executor's cache into one's own. The plan has ``num_blocks`` of each in ``pull_sources``
    and ``pull_blocks``, behind those of the pulls before it.

    ``address`` is what the source's lease says of its cache (``kv_address``). Both executors have the same ``kv_kind``.
    If they are groups of ranks, the address is that of all ranks, and each rank here copies its part of the blocks.
    """

    pull: int
    """Its number, counted by the scheduler."""
    address: str
    num_blocks: int
    hosts: bool = False
    """The sources are blocks of the other's host tier; it may be one's own."""
    at_once: bool = False
    """Nothing that an earlier plan orders uses the target's blocks: it may begin before that is done."""


class PullReport(Record, frozen=True, kw_only=True):
    """Executor -> scheduler, over ``control``: the blocks of a pull are ``there``, for plans written from now on. If
    not, nobody knows what is in them, and nothing writes there any more. Each ``rank`` of an executor, of which there
    are ``ranks``, says so of its part of the blocks."""

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
    """When they were there, or given up, by the wall clock; 0: it was not said."""
    rank: int = 0
    ranks: int = 1
    promised: bool = False
    """They are not there yet, and what lent them is still read. But every plan from now on finds them there, in all
    that it does. Another report says when they are; if they are not then, the executor ends, and gives no result that
    was computed with them."""


def combine_reports(told: dict[int, PullReport], report: PullReport) -> PullReport | None:
    """Note what a rank says in ``told``, by rank. Once all have: what it comes to. The blocks are there if all parts
    are, as soon as the last one is. Another time changes nothing."""
    told[report.rank] = report
    if len(told) < report.ranks or report.ranks == 1:
        return report if report.ranks == 1 else None
    failed = [each for _, each in sorted(told.items()) if not each.there]
    return replace(
        report, rank=0, ranks=1, there=not failed, error=f"rank {failed[0].rank}: {failed[0].error}" if failed else "",
        bytes_per_s=0.0 if failed else min(each.bytes_per_s for each in told.values()),
        ended_s=max(each.ended_s for each in told.values()),
    )  # fmt: skip
