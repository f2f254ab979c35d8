"""A core with fake executors, detokenizer and clients around it, and the promises checked after every event."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from pagebus.actors.model.block_hash import hash_blocks, hashes_to_array
from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import (
    BlocksPulled,
    DetokenizersLive,
    Input,
    Note,
    Output,
    Preempted,
    ReplicaLost,
    ReplicaResult,
    ReplicaSuspended,
    RequestGivenUp,
    RequestOver,
    ToDetokenizer,
    ToIngress,
    ToJournal,
    ToReplica,
)
from pagebus.bus.messages import (
    END_NONE,
    AbortRequest,
    RequestFailed,
    RequestsDone,
    SamplingParams,
    SequenceEnded,
    SequenceStarted,
    StepPlan,
    StepResult,
    StopSequence,
    TokenizedRequest,
)
from tests.actors.scheduler.core.false_results import refuse_false
from tests.actors.scheduler.drafting_executor import DraftingExecutor
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.fake_model import expected_beams, expected_tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids below 40, others for each seed."""
    return [(7 * i + 13 * seed + i * i * (seed + 1)) % 40 for i in range(length)]


def request(
    name: str, prompt: list[int], *, block_size: int = 4, priority: int = 0, salt: str | None = None, **sampling: Any
) -> TokenizedRequest:
    """A tokenized request with hashes, greedy."""
    tokens = np.array(prompt, np.int32)
    return TokenizedRequest(
        request_id=name,
        ingress="web",
        sampling=SamplingParams(temperature=0.0, **sampling),
        priority=priority,
        prompt_token_ids=tokens,
        cache_salt=salt,
        block_hashes=hashes_to_array(hash_blocks(tokens, block_size, salt=salt)),
    )


def again(message: TokenizedRequest, attempt: str = "2") -> TokenizedRequest:
    """The same request, asked for once more."""
    return replace(message, attempt=attempt)


def fits(
    sent: TokenizedRequest,
    num_blocks: int,
    max_num_seqs: int,
    block_size: int = 4,
    window: int = 0,
    windowed_pages: int = 0,
    windowed_tokens: int = 0,
) -> bool:
    """Whether an executor of this size could serve the request alone."""
    if windowed_pages:
        held = 0 if sent.sampling.beam_width else -(-windowed_tokens // block_size) + 1
        alone = fits(sent, num_blocks // (1 + windowed_pages), max_num_seqs, block_size)
        return alone or (held > 0 and fits(sent, num_blocks - held * windowed_pages, max_num_seqs, block_size))
    if window and not sent.sampling.beam_width and num_blocks > -(-window // block_size):
        return True
    sampling = sent.sampling
    num_tokens = len(sent.prompt_token_ids) + (sampling.max_tokens or 0) - 1
    shared, width = len(sent.prompt_token_ids) // block_size, max(1, sampling.beam_width)
    return shared + width * (-(-num_tokens // block_size) - shared) <= num_blocks and width <= max_num_seqs


@dataclass
class Heard:
    """What a detokenizer knows of one sequence."""

    started: SequenceStarted
    tokens: list[int] = field(default_factory=list)
    ends: int = 0
    stopped: bool = False
    aborted: bool = False


class World:
    """``stop_at`` maps (request, choice) to the output index at which the detokenizer finds a stop string."""

    def __init__(self, **config: Any) -> None:
        self.config = CoreConfig(**{"block_size": 4, **config})
        self.core = Core(self.config)
        self.executors: dict[str, FakeExecutor] = {}
        self.requests: dict[str, TokenizedRequest] = {}
        self.heard: dict[int, Heard] = {}
        self.failed: dict[str, RequestFailed] = {}
        self.over: set[str] = set()
        self.pending: list[Input] = []
        """What detokenizer and ingress have to say at once to something they were told."""
        self.aborted: set[str] = set()
        self.stop_at: dict[tuple[str, int], int] = {}
        self.notes: list[Note] = []
        self.preempted: list[Preempted] = []
        self.given_up: list[str] = []
        self.plans: list[tuple[str, StepPlan]] = []
        self.last_steps: Counter[str] = Counter()
        self.num_kills = 0
        self.doubts = 0
        """Of so many results the core sees false versions first; 0: of none."""
        self.now_s = 0.0
        self.core.handle(DetokenizersLive(("text",)))

    # -- events -------------------------------------------------------------------------------------------------------
    def send(self, *messages: Input) -> list[Output]:
        """Inputs that arrive together, and what the core answers."""
        for message in messages:
            if isinstance(message, TokenizedRequest):
                self.requests.setdefault(message.request_id, message)
                self.over.discard(message.request_id)
            elif isinstance(message, AbortRequest):
                self.aborted.add(message.request_id)
            self.core.handle(message)
        self.now_s += 0.001
        outputs = self.core.plan(self.now_s)
        for output in outputs:
            self._receive(output)
        self.core.check_integrity()
        self._check_salts()
        self._plan_again()
        if self.pending:
            pending, self.pending = self.pending, []
            self.send(*pending)
        return outputs

    def _plan_again(self) -> None:
        """It changes nothing, but that somebody goes elsewhere who was passed over for a prefix, and for whom others
        then left no slot."""
        more = self.core.plan(self.now_s)
        for output in more if len(self.executors) > 1 else ():
            self._receive(output)
        again = self.core.plan(self.now_s) if len(self.executors) > 1 else more
        assert again == [], "planning again, without news, must change nothing"

    def _check_salts(self) -> None:
        """No block is in the tables of two tenants."""
        salts: dict[tuple[str | None, int], str | None] = {}
        for sequence in self.core.lifecycle.sequences.values():
            for block in sequence.blocks:
                salt = salts.setdefault((sequence.replica, block), sequence.request.salt)
                assert salt == sequence.request.salt, f"{sequence.request.id} has a block of another tenant"

    def join(self, executor: FakeExecutor | None = None, **options: Any) -> FakeExecutor:
        if executor is None:
            kind = DraftingExecutor if options.get("num_drafts") else FakeExecutor
            executor = kind(**{"depth": self.config.pipeline_depth, **options})
        self.executors[executor.name] = executor
        executor.last_step = self.last_steps[executor.name]
        self.send(executor.joined)
        return executor

    def kill(self, name: str) -> None:
        """The executor is gone; what it had not answered will never be."""
        self.num_kills += 1
        self.remove(name)

    def remove(self, name: str) -> None:
        """The executor has ended."""
        executor = self.executors.pop(name)
        self.last_steps[name] = executor.last_step
        for each in self.executors.values():
            each.pulls.keep_promises(sys.maxsize)  # or these would end as well
        executor.pulls.end()
        self.send(ReplicaSuspended(name))
        self.send(ReplicaLost(name, "killed"))

    def step(self, name: str | None = None) -> StepResult:
        """One executor runs its next plan, and everybody reads the result."""
        name = name or next(each for each, executor in self.executors.items() if executor.queue)
        executor = self.executors[name]
        is_last = executor.queue[0].is_last
        result = executor.run_one()
        if self.doubts and result.step % self.doubts == 0:
            refuse_false(self.core, name, result)
        stops = self._listen(result)
        self.send(ReplicaResult(name, result), *stops)
        if is_last:
            wanted = {order.address for each in self.executors.values() for order in each.pulls.orders}
            assert executor.pulls.address not in wanted, "an executor may end that lends blocks"
            self.remove(name)
        return result

    def obey(self, name: str) -> None:
        """The disk of one executor does what the oldest plan orders, and the scheduler reads the report."""
        self.send(self.executors[name].disk.obey_one())

    def pull(self, name: str) -> None:
        """One executor does its oldest pull, and the scheduler reads the report."""
        self.send(self.executors[name].pulls.pull_one())

    def run(self, limit: int = 20_000) -> None:
        """Until nothing is in flight."""
        for _ in range(limit):
            busy = [name for name, executor in self.executors.items() if executor.queue]
            obeying = [name for name, executor in self.executors.items() if executor.disk.orders]
            pulling = [name for name, executor in self.executors.items() if executor.pulls.orders]
            if not busy and not obeying and not pulling:
                return
            for name in busy:
                self.step(name)
            for name in obeying:
                if name in self.executors:  # it may have drained
                    self.obey(name)
            for name in pulling:
                if name in self.executors:
                    self.pull(name)
        raise AssertionError("it does not come to an end")

    # -- the other actors ---------------------------------------------------------------------------------------------
    def _receive(self, output: Output) -> None:
        match output:
            case ToReplica(replica, plan):
                for new in plan.new_sequences:
                    sequence = self.core.lifecycle.sequences[new.sequence_id]
                    unheard = sequence.beam_group is None and not sequence.request.away
                    assert new.sequence_id in self.heard or not unheard, "a plan came before its SequenceStarted"
                self.plans.append((replica, plan))
                self.executors[replica].submit(plan)
            case ToDetokenizer("text", SequenceStarted() as started):
                self._start(started)
            case ToDetokenizer("text", SequenceEnded() as ended):
                heard = self.heard[ended.sequence_id]
                assert not heard.aborted, "ended twice"
                heard.aborted = True
            case ToIngress("web", RequestFailed() as failure):
                assert failure.request_id not in self.failed, "failed twice"
                self.failed[failure.request_id] = failure
            case Preempted():
                self.preempted.append(output)
            case RequestGivenUp(request_id):
                self.given_up.append(request_id)
            case Note():
                self.notes.append(output)
            case ToJournal() | BlocksPulled():
                pass
            case RequestOver(request_id):
                assert request_id not in self.over, f"{request_id} is over twice"
                self.over.add(request_id)
            case _:
                raise AssertionError(f"unexpected {output}")

    def _start(self, started: SequenceStarted) -> None:
        """A sequence begins, or its text is made anew: with every token that anybody has ever heard."""
        before = self.heard.get(started.sequence_id)
        assert before is None or before.aborted, "started twice"
        heard = self.heard[started.sequence_id] = Heard(started, started.output_token_ids.tolist())
        assert before is None or heard.tokens[: len(before.tokens)] == before.tokens, "a token was lost or changed"
        heard.ends += started.output_end != END_NONE
        stop = self.stop_at.get((started.request_id, started.choice_index))
        if stop is not None and (stop < len(heard.tokens) - 1 or (stop == len(heard.tokens) - 1 and not heard.ends)):
            del heard.tokens[stop + 1 :]
            heard.ends, heard.stopped = 0, True
            self.pending.append(StopSequence(request_id=started.request_id, sequence_id=started.sequence_id))
        if heard.ends or heard.stopped:
            self.pending += self._done(started.request_id)

    def _listen(self, result: StepResult) -> list[StopSequence | RequestsDone]:
        """What detokenizer and ingress make of a result: strings that end sequences, answers that are complete."""
        stops: list[StopSequence | RequestsDone] = []
        columns = (result.sequence_ids, result.token_ids, result.token_indexes, result.ends)
        for sequence_id, token, index, end in zip(*(column.tolist() for column in columns), strict=True):
            if sequence_id not in self.heard:
                continue  # a beam of a search
            heard = self.heard[sequence_id]
            if heard.stopped or heard.aborted:
                continue
            assert index == len(heard.tokens), f"token {index} came after {len(heard.tokens)} tokens"
            assert not heard.ends, "a token after the end"
            heard.tokens.append(token)
            heard.ends += end != END_NONE
            started = heard.started
            if not heard.ends and self.stop_at.get((started.request_id, started.choice_index)) == index:
                heard.stopped = True
                stops.append(StopSequence(request_id=started.request_id, sequence_id=sequence_id))
            if heard.ends or heard.stopped:
                stops += self._done(started.request_id)
        return stops

    def _done(self, name: str) -> list[RequestsDone]:
        choices = [heard for heard in self.heard.values() if heard.started.request_id == name]
        complete = sum(bool(heard.ends or heard.stopped) for heard in choices) == self.requests[name].sampling.n
        return [RequestsDone(request_ids=(name,), attempts=(self.requests[name].attempt,))] if complete else []

    # -- promises -----------------------------------------------------------------------------------------------------
    def check_end(self) -> None:
        """Everything has ended, in the right way and with the right tokens, and nothing is left."""
        by_request: dict[str, list[Heard]] = {}
        for heard in self.heard.values():
            by_request.setdefault(heard.started.request_id, []).append(heard)
        for name, sent in self.requests.items():
            choices = sorted(by_request.get(name, []), key=lambda each: each.started.choice_index)
            if name in self.failed:
                assert name not in self.aborted or not choices
                continue
            if name not in self.aborted:
                assert [each.started.choice_index for each in choices] == list(range(sent.sampling.n)), name
            for heard in choices:
                self._check_sequence(sent, heard)
        assert not self.core.requests
        assert not self.core.delivery.finished, "what was delivered is still kept"
        assert self.over >= self.requests.keys(), "a request was forgotten"
        assert not len(self.core.waiting)
        assert not len(self.core.planner.pulls), "pulls are left"
        assert self.core.num_running == 0
        assert self.core.is_idle
        for executor in self.executors.values():
            assert not executor.slots, "slots are left on the executor"
            pool = self.core.replicas[executor.name].pool
            assert pool.num_free == pool.num_blocks, "blocks are left"
            assert self.core.replicas[executor.name].host_tier.num_held == 0, "host blocks are left"
            known = self.core.replicas[executor.name].disk_tier.pool.stored
            assert {each.hex() for each in known} == executor.disk.stored.keys(), "the disk has other blocks than known"
        assert not self.core.lifecycle.sequences, "ids are left"

    def _check_sequence(self, sent: TokenizedRequest, heard: Heard) -> None:
        name, sampling = sent.request_id, sent.sampling
        ends = sampling.stop_token_ids + (() if sampling.ignore_eos else self.config.eos_token_ids)
        max_tokens = heard.started.max_tokens
        if sampling.beam_width:
            expected = expected_beams(sent.prompt_token_ids.tolist(), max_tokens, ends, sampling)
            assert heard.ends <= 1, f"{name} has {heard.ends} ends"
            assert heard.ends or heard.aborted, f"{name} has no end"
            assert heard.aborted <= (name in self.aborted)
            assert heard.tokens == (expected[heard.started.choice_index] if heard.ends else []), name
            return
        expected = expected_tokens(sent.prompt_token_ids.tolist(), max_tokens, ends, sampling.min_tokens)
        if name in self.aborted:
            assert heard.tokens == expected[: len(heard.tokens)], name
            assert heard.ends or heard.aborted or heard.stopped, f"{name} has no end"
            return
        over = (
            heard.ends or heard.stopped
        )  # told of its end all the same: the client may be sooner than the last result
        assert over or not heard.aborted, f"{name} was aborted by nobody"
        stop = self.stop_at.get((name, heard.started.choice_index))
        if stop is not None and stop < len(expected) - 1:
            expected = expected[: stop + 1]
            assert heard.stopped
        else:
            assert heard.ends == 1, f"{name} has {heard.ends} ends"
        assert heard.tokens == expected, name


def come_back(world: World, name: str) -> None:
    """The client of a request asks for it once more."""
    world.requests[name] = message = again(world.requests[name])
    world.send(message)
