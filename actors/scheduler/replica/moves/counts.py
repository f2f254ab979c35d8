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
