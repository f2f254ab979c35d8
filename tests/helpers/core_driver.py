"""The scheduler's core on top of a real engine, without a bus: for tests and measurements that need both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pagebus.actors.model.block_hash import hash_blocks, hashes_to_array
from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import (
    DetokenizersLive,
    Input,
    Note,
    Preempted,
    ReplicaJoined,
    ReplicaLost,
    ReplicaResult,
    RequestOver,
    ToDetokenizer,
    ToJournal,
    ToReplica,
)
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.bus.messages import (
    END_NONE,
    RequestsDone,
    SamplingParams,
    SequenceStarted,
    StepPlan,
    StepResult,
    TokenizedRequest,
)
from tests.helpers.engine_driver import Driver

REPLICA = "gpu"


@dataclass(slots=True)
class Answer:
    """What became of a request: its tokens, when each came (seconds of the wall clock), how many were cached."""

    sent_s: float
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    cached: int = 0
    ended: bool = False
    beams: list[list[int]] = field(default_factory=list)
    """Of a beam search, best first; it has no ``tokens``."""

    @property
    def first_token_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.times_s[0] - self.sent_s


class CoreDriver:
    """A core of its own over ``driver``'s engine; requests have one sequence each, or are beam searches. Keeps plans,
    results and notes. ``limits`` replace what the engine says of itself (fields of :class:`ReplicaJoined`)."""

    def __init__(self, driver: Driver, *, depth: int = 2, limits: dict[str, Any] | None = None, **config: Any) -> None:
        driver.epoch += 1
        self.driver = driver
        info = driver.info
        config = {"window": info.window, **config}
        self.core = Core(
            CoreConfig(block_size=info.block_size, pipeline_depth=depth, epoch=driver.epoch, **config),
        )
        self.answers: dict[str, Answer] = {}
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.preempted: list[Preempted] = []
        self._names: dict[int, str] = {}
        self._in_flight = 0
        joined = ReplicaJoined(
            replica=REPLICA,
            epoch=0,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=info.max_num_batched_tokens,
            num_host_blocks=driver.engine.num_host_blocks,
            block_bytes=info.block_bytes,
            copy_bytes_per_s=info.copy_bytes_per_s,
            prefill_tokens_per_s=info.prefill_tokens_per_s,
            windowed_pages=info.windowed_pages,
            windowed_tokens=info.windowed_tokens,
            num_drafts=info.num_drafts,
            stages=info.stages,
        )
        self._joined = replace(joined, **(limits or {}))
        self.take(DetokenizersLive(("text",)), self._joined)

    def ignore_times(self) -> None:
        """Let prices of drafts follow from no clock: how many are planned is then the same on each machine."""
        prices = self.replica.depth.prices
        prices.done = lambda launched_s, done_s: prices._in_flight.popleft()  # type: ignore[method-assign]

    @property
    def replica(self) -> Replica:
        return self.core.replicas[REPLICA]

    def send(
        self, name: str, prompt: Sequence[int], max_tokens: int, sampling: dict[str, Any] | None = None, **fields: Any
    ) -> Answer:
        """A greedy request, or what ``sampling`` says; ``fields`` are those of :class:`TokenizedRequest`."""
        tokens = np.array(prompt, np.int32)
        answer = self.answers[name] = Answer(time.time())
        given = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | (sampling or {})
        hashes = hashes_to_array(hash_blocks(tokens, self.core.config.block_size))
        message = TokenizedRequest(
            request_id=name,
            ingress="web",
            sampling=SamplingParams(**given),
            prompt_token_ids=tokens,
            block_hashes=hashes,
            arrived_s=answer.sent_s,
            **fields,
        )
        self.take(message)
        return answer

    def take(self, *messages: Input) -> None:
        """Inputs for the core, then what it plans."""
        for message in messages:
            self.core.handle(message)
        for output in self.core.plan(time.time()):
            match output:
                case ToReplica(_, plan):
                    self.plans.append(plan)
                    self._in_flight += 1
                    self.driver.engine.submit(plan, self.driver.epoch)
                case ToDetokenizer(_, SequenceStarted() as started):
                    self._names[started.sequence_id] = started.request_id
                    self.answers[started.request_id].cached = started.num_cached_tokens
                    if started.output_end != END_NONE:
                        self.answers[started.request_id].beams.append(started.output_token_ids.tolist())
                case ToJournal() | RequestOver():
                    pass
                case Preempted():
                    self.preempted.append(output)
                case Note():
                    pass
                case _:
                    raise AssertionError(f"unexpected {output}")

    def lose(self, successor: Driver) -> None:
        """The engine dies with all steps in flight, and another, which has run none of later schedulers, takes its
        place."""
        for _ in range(self._in_flight):
            self.driver.result()
        self._in_flight, self.driver = 0, successor
        successor.epoch = self.core.config.epoch  # the core drops results of plans that are another scheduler's
        self._joined = replace(self._joined, epoch=self._joined.epoch + 1)
        self.take(ReplicaLost(REPLICA, "killed"), self._joined)

    def step(self) -> StepResult:
        """Wait for the next result, and hand it on."""
        result = self.driver.result()
        self._in_flight -= 1
        self.results.append(result)
        for sequence_id, token, end in zip(
            result.sequence_ids.tolist(), result.token_ids.tolist(), result.ends.tolist(), strict=True
        ):
            if sequence_id not in self._names:
                continue  # a lane of a beam search
            answer = self.answers[self._names[sequence_id]]
            answer.tokens.append(token)
            answer.times_s.append(result.done_s)
            answer.ended = bool(end)
        self.take(ReplicaResult(REPLICA, result))
        if done := tuple(self.core.delivery.finished):  # clients take everything at once
            self.take(RequestsDone(request_ids=done, attempts=("",) * len(done)))
        return result

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is in flight and nothing is left to do, or until ``until`` says so after a step."""
        while self._in_flight and not until():
            self.step()
        assert self._in_flight or self.core.is_idle, "the scheduler is stuck"
