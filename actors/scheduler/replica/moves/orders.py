"""The pulls of a replica's next plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pagebus.bus.messages import BlockPull
from pagebus.bus.messages.field_types import int_array


@dataclass(slots=True)
class PullOrders:
    """``pulls``, each with its number of ``sources`` there and ``blocks`` here."""

    pulls: list[BlockPull] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def add(
        self, number: int, address: str, sources: list[int], blocks: list[int], *, hosts: bool = False,
        at_once: bool = False,
    ) -> None:  # fmt: skip
        """Pull ``sources`` of the cache at this address, or of its host tier, into ``blocks``; ``at_once`` as in the
        message."""
        self.pulls.append(BlockPull(pull=number, address=address, num_blocks=len(blocks), hosts=hosts, at_once=at_once))
        self.sources += sources
        self.blocks += blocks

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.pulls)

    @property
    def are_urgent(self) -> bool:
        """Whether a pull may begin at once."""
        return any(each.at_once for each in self.pulls)

    def columns(self) -> dict[str, Any]:
        """The fields of :class:`StepPlan` with these pulls."""
        if not self.pulls:
            return {}
        return {
            "pulls": tuple(self.pulls),
            "pull_sources": int_array(self.sources),
            "pull_blocks": int_array(self.blocks),
        }
