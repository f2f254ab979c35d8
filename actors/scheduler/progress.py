"""The progress of a request, for reports: the times of its stages, and counts. Decisions read only ``started_s``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class RequestProgress:
    """Times are 0 for stages not reached yet. ``num_preemptions``: of all its sequences. ``num_drafted`` and
    ``num_accepted``: drafts verified and accepted in slots that its sequences have left. ``num_output``: their output
    tokens, once it is over. ``traced``: its ingress gets these times."""

    priority: int = 0
    taken_s: float = 0.0
    tokenized_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_output: int = 0
    aborted: bool = False
    traced: bool = False

    def start(self, now_s: float) -> None:
        """One of its sequences enters a batch."""
        self.started_s = self.started_s or now_s

    def got_token(self, done_s: float) -> None:
        """One of its sequences has its first token."""
        self.first_token_s = self.first_token_s or done_s

    def got_end(self, done_s: float) -> None:
        """One of its sequences has its last token."""
        self.ended_s = done_s

    def was_preempted(self) -> None:
        """One of its sequences was preempted for want of blocks."""
        self.num_preemptions += 1

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """One of its sequences has left a slot in which drafts were verified."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def trace(self, *, traced: bool) -> None:
        """Set whether its ingress gets these times."""
        self.traced = traced
