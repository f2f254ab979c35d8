"""Output that is lost on its way is made again: whatever happens to detokenizers, ingresses, clients and schedulers."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from fake_executor import FakeExecutor
from world import World, request

from actors.scheduler.core import Core
from actors.scheduler.events import (
    DetokenizerLost,
    DetokenizersLive,
    IngressLost,
    Input,
    Output,
    ReplicaLost,
    ReplicaResult,
    ToDetokenizer,
    ToJournal,
)
from actors.scheduler.journal import Ledger, checkpoint
from bus.contract import EntryId
from bus.messages import (
    AbortRequest,
    Checkpoint,
    RequestMoved,
    RequestsDone,
    SequenceEnded,
    SequencesNamed,
    SequenceStarted,
    StepResult,
    TokenizedRequest,
)

KEPT_S = 30.0


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed + 7 * index) % 40 for index in range(length)]


def again(message: TokenizedRequest, attempt: str = "2") -> TokenizedRequest:
    """The same request, asked for once more."""
    return dataclasses.replace(message, attempt=attempt)


def come_back(world: World, name: str, attempt: str = "2") -> None:
    world.requests[name] = message = again(world.requests[name], attempt)
    world.send(message)


# -- detokenizers ------------------------------------------------------------------------------------------------------
def test_another_detokenizer_starts_anew_with_all_tokens() -> None:
    """What runs and what waits loses no token when the text is lost; without a detokenizer nothing is computed."""
    world = World()
    world.join(max_num_seqs=1)
    world.send(request("a", prompt(4), max_tokens=30), request("b", prompt(4), max_tokens=3))
    for _ in range(5):
        world.step()
    world.send(DetokenizerLost("text"), DetokenizersLive(()))
    world.run()
    assert world.core.num_running == 0
    world.send(DetokenizersLive(("text",)))
    world.run()
    world.check_end()


def test_who_has_lost_its_listener_is_parked_and_not_preempted() -> None:
    """It enters a batch anew, but blocks were not short: counted apart, by replica and for the request."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=30))
    for _ in range(5):
        world.step()
    world.send(DetokenizerLost("text"), DetokenizersLive(("text",)))
    (replica,) = world.core.replicas.values()
    assert (replica.num_parked, replica.num_swaps, replica.num_recomputes, world.core.num_preemptions) == (1, 0, 0, 0)
    assert world.core.requests["a"].num_preemptions == 0
    world.run()
    world.check_end()


def test_a_finished_answer_is_told_again_until_it_is_delivered() -> None:
    """The end of a sequence goes with its tokens, and nothing is computed for it."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=5, n=2))
    world._done = lambda name: []  # type: ignore[method-assign]
    world.run()
    steps = len(world.plans)
    outputs = world.send(DetokenizerLost("text"), DetokenizersLive(("text",)))
    started = [each.message for each in outputs if isinstance(each, ToDetokenizer)]
    told = [each for each in started if isinstance(each, SequenceStarted)]
    assert [len(each.output_token_ids) for each in told] == [5, 5]
    assert all(each.output_end for each in told)
    assert len(world.plans) == steps
    world.send(RequestsDone(request_ids=("a",), attempts=("",)))
    world.check_end()


def test_an_answer_waits_for_a_detokenizer_as_long_as_it_takes() -> None:
    """While nobody can tell it to its client, who is there, a finished request is not given up."""
    world = World(resume_timeout_s=0.0)
    world.join()
    done, world._done = world._done, lambda name: []  # type: ignore[method-assign]
    world.send(request("a", prompt(4), max_tokens=5))
    world.run()
    world.send(DetokenizerLost("text"), DetokenizersLive(()))
    world._done = done  # type: ignore[method-assign]
    for _ in range(3):
        world.now_s += 1000.0
        world.send()
    world.send(DetokenizersLive(("text",)))
    world.run()
    world.check_end()


def test_a_replica_that_no_detokenizer_has_found() -> None:
    """It dies before anybody but the scheduler has read its results: what ran and what ended there is told anew."""
    world = World()
    world.join()
    listen, world._listen = world._listen, lambda result: []  # type: ignore[method-assign]
    world.send(request("a", prompt(4), max_tokens=30), request("b", prompt(4), max_tokens=3))
    for _ in range(6):
        world.step()
    world._listen = listen  # type: ignore[method-assign]
    assert list(world.core.delivery.finished) == ["b"]
    del world.executors["gpu-0"]
    world.send(ReplicaLost("gpu-0", "killed", deaf=("text",)))
    world.join(FakeExecutor(name="gpu-1"))
    world.run()
    world.check_end()


def test_log_probabilities_are_told_again() -> None:
    """What was known of the tokens' log probabilities comes with them, and those of the prompt are computed again."""
    world = World()
    world.join()
    world.send(request("a", prompt(6), max_tokens=6, prompt_logprobs=0))
    for _ in range(3):
        world.step()
    world.send(DetokenizerLost("text"), DetokenizersLive(("text",)))
    world.run()
    world.check_end()
    scored = [new for _, plan in world.plans for new in plan.new_sequences if new.prompt_logprobs is not None]
    assert len(scored) == 2


@pytest.mark.parametrize("asked", [{"pooling": "mean"}, {"pooling": "last"}, {"prompt_logprobs": 0}])
@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_what_is_known_of_a_prompt_is_told_again(asked: dict[str, Any], steps: int, num_host_blocks: int) -> None:
    """Whenever its detokenizer is lost, also while the only token is on its way: whoever is told of the request last is
    told before the prompt is computed for it."""
    world = World()
    world.join(budget=4, num_host_blocks=num_host_blocks)
    done, world._done = world._done, lambda name: []  # type: ignore[method-assign]
    world.send(request("a", prompt(11), max_tokens=1, **asked))
    for _ in range(steps):
        world.step()
    num_plans = len(world.plans)
    world.send(DetokenizerLost("text"), DetokenizersLive(("text",)))
    world._done = done  # type: ignore[method-assign]
    world.heard = {name: heard for name, heard in world.heard.items() if not heard.aborted}
    world.run()

    last = [new for _, plan in world.plans[num_plans:] for new in plan.new_sequences]
    assert len(last) == 1
    assert last[0].num_computed_tokens == 0 or asked == {"pooling": "last"}
    (told,) = world.heard.values()
    assert told.started.sequence_id == last[0].sequence_id
    assert not len(told.started.output_token_ids)
    world.check_end()


# -- clients -----------------------------------------------------------------------------------------------------------
def test_a_client_that_does_not_come_back_is_given_up() -> None:
    """Its request goes on for a while, and nobody is told of it."""
    world = World(resume_timeout_s=KEPT_S)
    world.join()
    world.send(request("a", prompt(4), max_tokens=500))
    world.step()
    world.send(IngressLost("web"))
    assert next(iter(world.heard.values())).aborted
    world.step()
    world.aborted.add("a")
    world.now_s += KEPT_S + 1
    world.send()
    world.run()
    world.check_end()


def test_each_answer_is_kept_for_a_time_of_its_own() -> None:
    """Clients that never say that they have it: one after the other is given up, in the order of their ends."""
    world = World(resume_timeout_s=KEPT_S)
    world.join()
    world._done = lambda name: []  # type: ignore[method-assign]
    for name in "abc":
        world.send(request(name, prompt(4), max_tokens=3))
        world.run()
        world.now_s += 10.0
    kept = []
    for _ in range(4):
        kept.append("".join(world.core.delivery.finished))
        world.now_s += 9.0
        world.send()
    assert kept == ["abc", "bc", "c", ""]


@pytest.mark.parametrize("steps", [1, 4, 50])
def test_a_client_that_comes_back_gets_everything(steps: int) -> None:
    """Queued, running or finished: the text is made anew, with every token."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=12))
    world._done = lambda name: []  # type: ignore[method-assign]
    for _ in range(min(steps, 11)):
        world.step()
    world.send(IngressLost("web"))
    come_back(world, "a")
    del world._done
    if steps == 50:
        world.run()
        world.send(RequestsDone(request_ids=("a",), attempts=("2",)))
    world.run()
    world.check_end()


def test_what_has_ended_is_void_when_its_client_leaves() -> None:
    """A detokenizer that is behind has not seen the end, and would tell it where the client was: it would take the next
    announcement, which says where the client is now, for a repeat."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=3))
    world._done = lambda name: []  # type: ignore[method-assign]
    world.run()
    (void,) = (each.message for each in world.send(IngressLost("web")) if isinstance(each, ToDetokenizer))
    assert isinstance(void, SequenceEnded)
    (anew,) = (each.message for each in world.send(again(world.requests["a"])) if isinstance(each, ToDetokenizer))
    assert isinstance(anew, SequenceStarted)
    assert anew.sequence_id == void.sequence_id


def test_a_choice_that_has_ended_is_not_told_again_before_the_prompt() -> None:
    """Which comes with the first choice, and that one only runs on: an ingress has no use for an end without it."""
    world = World()
    world.join()
    world.stop_at[("a", 1)] = 2
    world.send(request("a", prompt(4), n=2, max_tokens=30, echo=True))
    for _ in range(8):
        world.step()
    told: list[Output] = []
    emit = world.core.delivery._emit
    world.core.delivery._emit = lambda output: (told.append(output), emit(output))[1]
    come_back(world, "a")
    world.run()
    world.check_end()
    messages = [output.message for output in told if isinstance(output, ToDetokenizer)]
    assert [each.choice_index for each in messages if isinstance(each, SequenceStarted)] == [0, 1]


def test_what_an_earlier_attempt_says_does_not_count() -> None:
    """The old connection is noticed to be gone only after the client is back: its abort changes nothing."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=20))
    for _ in range(3):
        world.step()
    come_back(world, "a")
    world.core.take(AbortRequest(request_id="a"))
    world.core.take(RequestsDone(request_ids=("a",), attempts=("",)))
    world.run()
    world.check_end()


def test_who_makes_the_text_of_what_is_delivered_already_is_told() -> None:
    """A client may have had all of it from what was told before a restart, while it is computed and told once more."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=20, n=2))
    for _ in range(3):
        world.step()
    outputs = world.send(RequestsDone(request_ids=("a",), attempts=("",)))
    told = [each.message for each in outputs if isinstance(each, ToDetokenizer)]
    assert [(type(each), each.reason) for each in told] == [(SequenceEnded, "abort")] * 2
    world.aborted.add("a")
    world.run()
    world.check_end()


def test_a_client_may_say_that_it_comes_back() -> None:
    """Such an abort keeps the request; a plain one afterwards ends it."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=20))
    world.core.take(AbortRequest(request_id="a", may_return=True))
    world.send()
    assert "a" in world.core.requests
    world.send(AbortRequest(request_id="a"))
    world.run()
    world.check_end()


def test_a_different_request_under_the_same_id_is_refused() -> None:
    """It gets a 422, and the first one goes on."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=5))
    world.core.take(again(request("a", prompt(5), max_tokens=5)))
    world.send()
    assert world.failed.pop("a").status == 422
    world.run()
    world.check_end()


# -- schedulers --------------------------------------------------------------------------------------------------------
class Succession(World):
    """A world whose scheduler may be replaced at any time. What the old one leaves is what it has sent."""

    def __init__(self, **config: object) -> None:
        super().__init__(**config)
        self.journal: list[Checkpoint | SequencesNamed | RequestMoved] = []
        self.results: list[StepResult] = []
        self.known: dict[tuple[str, int], list[int]] = {}
        """What clients have of each choice, as of the last replacement."""

    def send(self, *messages: Input) -> list[Output]:
        self.results += [message.result for message in messages if isinstance(message, ReplicaResult)]
        return super().send(*messages)

    def _receive(self, output: Output) -> None:
        if isinstance(output, ToJournal):
            self.journal.append(output.message)
        super()._receive(output)

    def _start(self, started: SequenceStarted) -> None:
        super()._start(started)
        known = self.known.get((started.request_id, started.choice_index), [])
        assert self.heard[started.sequence_id].tokens[: len(known)] == known, "a token was lost or changed"

    def sum_up(self) -> None:
        """A checkpoint, which makes everything before it superfluous."""
        self.journal = [checkpoint(self.core, {}, {}, ingresses=(), detokenizers=())]
        self.results.clear()

    def replace(self) -> None:
        """The steps in flight are executed, then another scheduler takes in all requests that are not over."""
        late: list[Input] = []
        for executor in self.executors.values():
            while executor.queue:
                self.results.append(executor.run_one())
                late += self._listen(self.results[-1])
        ledger = Ledger()
        for entry in self.journal:
            ledger.read(entry)
        for result in self.results:
            ledger.take(result)
        outputs = ledger.outputs()
        self.core = Core(dataclasses.replace(self.core.config, epoch=self.core.config.epoch + 1))
        done = {name for each in late if isinstance(each, RequestsDone) for name in each.request_ids}
        for sequence_id, heard in list(self.heard.items()):
            if heard.started.request_id not in self.over | done:
                self.known[heard.started.request_id, heard.started.choice_index] = heard.tokens
                del self.heard[sequence_id]
        self.core.take(DetokenizersLive(("text",)))
        for name, message in self.requests.items():
            if name not in self.over:
                self.core.readmit(message, outputs.get(name, {}))
        for executor in self.executors.values():
            executor.follow(self.core.config.epoch)
            self.core.take(executor.joined)
        self.journal.clear()
        self.results.clear()
        self.sum_up()
        self.send(*late)


@pytest.mark.parametrize("seed", range(40))
def test_a_successor_goes_on_where_the_old_scheduler_was(seed: int) -> None:
    """Replaced at random moments, with and without checkpoints: no token is lost, changed or told twice."""
    rng = random.Random(seed)
    world = Succession(pipeline_depth=rng.randint(1, 3), eos_token_ids=(5,))
    world.stop_at["r1", 0] = 4
    for number in range(rng.randint(1, 2)):
        world.join(name=f"gpu-{number}", num_blocks=rng.choice([14, 64]), max_num_seqs=rng.randint(1, 6))
    for number in range(6):
        sampling = {"max_tokens": rng.randint(1, 20), "n": rng.choice([1, 1, 2, 3]), "ignore_eos": number % 2 == 0}
        world.send(request(f"r{number}", prompt(rng.randint(1, 12), number), **sampling))
        for _ in range(rng.randint(0, 8)):
            busy = [name for name, executor in world.executors.items() if executor.queue]
            if busy:
                world.step(rng.choice(busy))
        if rng.random() < 0.5:
            world.sum_up()
        if rng.random() < 0.6:
            world.replace()
        if rng.random() < 0.2:
            world.send(DetokenizerLost("text"), DetokenizersLive(("text",)))
    world.run()
    world.check_end()


def test_a_moved_client_is_known_to_the_successor() -> None:
    """Replies go to where the client was last, also if it has come back since the last checkpoint."""
    world = Succession()
    world.join()
    world.send(request("a", prompt(4), max_tokens=20))
    world.sum_up()
    come_back(world, "a")
    ledger = Ledger()
    for entry in world.journal:
        ledger.read(entry)
    assert ledger.moved["a"].attempt == "2"
    world.sum_up()
    ledger = Ledger()
    ledger.read(world.journal[0])
    assert ledger.moved["a"].attempt == "2"
    world.run()
    world.send(RequestsDone(request_ids=("a",), attempts=("2",)))
    world.check_end()


def test_scores_survive_a_checkpoint() -> None:
    """Log probabilities of a checkpoint and of the results after it are put together."""
    world = World()
    world.join()
    world.send(request("a", prompt(4), max_tokens=20, logprobs=2))
    sequence = world.core.requests["a"].sequences[0]
    for _ in range(3):
        world.step()
    told = [*sequence.scores.bits]
    assert len(told) > 1
    ledger = Ledger()
    ledger.read(checkpoint(world.core, {"gpu-0": EntryId(2, 3)}, {"gpu-0": 2}, ingresses=("web",), detokenizers=()))
    columns = {"logprob_rows": [0], "logprob_bits": [9], "top_counts": [1], "top_ids": [5], "top_bits": [6]}
    output = ledger.outputs()["a"][0]
    index = len(output.tokens)
    ledger.take(
        StepResult(
            step=9, scheduler_epoch=1, received_s=0, launched_s=0, done_s=0, num_computed_tokens=1,
            sequence_ids=np.array([sequence.id], np.int32), token_ids=np.array([1], np.int32),
            token_indexes=np.array([index], np.int32), ends=np.array([1], np.int32),
            **{name: np.array(values, np.int32) for name, values in columns.items()},
        )
    )  # fmt: skip
    output = ledger.outputs()["a"][0]
    assert (len(output.tokens), output.end) == (index + 1, 1)
    assert [*output.scores.bits] == [*told, 9]
    assert ledger.positions == {"gpu-0": EntryId(2, 3)}
    world.run()
    world.check_end()
