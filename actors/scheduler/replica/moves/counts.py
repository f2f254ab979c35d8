"""Counts of blocks moved to and from one replica since it joined."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class MoveCounts:
    """Blocks that it pulled (``num_pulled_hosts`` of them from a host tier), lent, and failed to pull. Because of the
    pulled ones, ``num_pulled_tokens`` need not be computed."""

    num_pulled: int = 0
    num_pulled_tokens: int = 0
    num_lent: int = 0
    num_failed: int = 0
    num_pulled_hosts: int = 0

    def pulled(self, num_blocks: int, num_tokens: int, *, hosts: bool) -> None:
        """Count blocks that have come; ``hosts``: from a host tier."""
        self.num_pulled += num_blocks
        self.num_pulled_tokens += num_tokens
        if hosts:
            self.num_pulled_hosts += num_blocks

    def lent(self, num_blocks: int) -> None:
        """Count blocks that another has pulled from here."""
        self.num_lent += num_blocks

    def failed(self, num_blocks: int) -> None:
        """Count blocks that could not be pulled."""
        self.num_failed += num_blocks
