"""Where the time to a first token goes, as the scheduler and the executor's reports tell it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import Input, Output, ReplicaResult, ToReplica
from pagebus.bus.messages import PullReport, TokenizedRequest

STAGES = (
    "asked", "1 read", "2 hashed", "3 with the scheduler", "4 pull planned", "5 copied", "6 reported", "7 step planned",
    "8 step received",
)  # fmt: skip
"""Of a prompt, in this order. What is between the fourth and the fifth is mostly the copy, or
what of it is done when it is promised."""


class Timeline:
    """What a core does for one replica, by the wall clock. It wraps the core's methods for good."""

    def __init__(self, core: Core, replica: str) -> None:
        self._events: list[tuple[float, str]] = []
        self._replica, self._bytes = replica, 0
        self._handle, self._plan = core.handle, core.plan_in_turns
        self._core = core
        self._reached_s: dict[str, float] = {}
        self._step = 0
        """The plan with the prompt's tokens."""
        core.handle, core.plan_in_turns = self._note_input, self._note_plans  # type: ignore[method-assign]

    def note(self, what: str, at_s: float | None = None) -> None:
        """Something happened, now unless said otherwise."""
        self._events.append((time.time() if at_s is None else at_s, what))

    def stages_ms(self) -> dict[str, float]:
        """How long each of ``STAGES`` that the last prompt went through took; forgotten afterwards."""
        reached = [(stage, self._reached_s[stage]) for stage in STAGES if stage in self._reached_s]
        self._reached_s, self._step = {}, 0
        return {after: (until_s - since_s) * 1e3 for (_, since_s), (after, until_s) in pairwise(reached)}

    def reach(self, stage: str, at_s: float | None = None) -> None:
        """A prompt has come so far."""
        self._reached_s.setdefault(stage, time.time() if at_s is None else at_s)

    def told(self) -> str:
        """All that has happened, in milliseconds from the first; forgotten afterwards."""
        events, self._events = sorted(self._events), []
        return "  ".join(f"{(at_s - events[0][0]) * 1e3:.1f} {what}" for at_s, what in events)

    def _note_input(self, message: Input) -> None:
        if isinstance(message, TokenizedRequest):
            self.note("read by the tokenizer", message.taken_s)
            self.note("hashed", message.tokenized_s)
            self.note("request")
            self.reach("1 read", message.taken_s)
            self.reach("2 hashed", message.tokenized_s)
            self.reach("3 with the scheduler")
        elif isinstance(message, PullReport):
            copied = "promised" if message.promised else f"copied at {message.bytes_per_s / 1e9:.0f} GB/s"
            self.note(copied, message.ended_s)
            self.note("report")
            self.reach("5 copied", message.ended_s)
            self.reach("6 reported")
        elif isinstance(message, ReplicaResult) and message.replica == self._replica:
            result = message.result
            self.note(f"received {result.step}", result.received_s)
            self.note(f"launched {result.step}", result.launched_s)
            self.note(f"done {result.step}", result.done_s)
            self.note(f"result {result.step}")
            if result.step == self._step:
                self.reach("8 step received", result.received_s)
        self._handle(message)

    def _note_plans(self, now_s: float) -> Iterator[list[Output]]:
        began_s = time.time()
        for part in self._plan(now_s):
            for output in part:
                if isinstance(output, ToReplica) and output.replica == self._replica:
                    plan = output.message
                    if plan.pulls:
                        self.reach("4 pull planned")
                    elif plan.num_scheduled.sum() > 1:
                        self._step = plan.step
                        self.reach("7 step planned")
                    self.note("planning", began_s)
                    self.note(f"plan {plan.step}: {len(plan.pull_blocks)} pulled, {plan.num_scheduled.sum()} tokens")
            yield part
            began_s = time.time()
