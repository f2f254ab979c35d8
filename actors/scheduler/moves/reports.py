"""What the ranks of an executor say of a pull: each of its part of the blocks. It is over once all have."""

from __future__ import annotations

from msgspec.structs import replace

from pagebus.bus.messages import PullReport


def together(told: dict[int, PullReport], report: PullReport) -> PullReport | None:
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
