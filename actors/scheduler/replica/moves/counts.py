"""What has moved to and from one replica since it joined."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class MoveCounts:
    """Blocks that it pulled, lent, and could not pull; and tokens that need not be computed for the first.
    ``num_pulled_hosts``: those of the pulled that came from a host tier."""

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
