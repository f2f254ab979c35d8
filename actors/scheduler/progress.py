"""What is told of a request's way: the times of its stages, and counts. No decision reads it, but ``started_s``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class RequestProgress:
    """``priority``, the times of its stages (0: not reached yet), ``num_preemptions`` of its sequences, how many drafts
    were verified and accepted in slots that these have left (``num_drafted``, ``num_accepted``), ``num_output``, their
    output tokens once it is over, and ``aborted``. ``traced``: its ingress gets these times."""

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
        """One of its sequences has given its blocks up."""
        self.num_preemptions += 1

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """One of its sequences has left a slot in which drafts were verified."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def trace(self, *, traced: bool) -> None:
        """Whether its ingress gets these times from now on."""
        self.traced = traced
