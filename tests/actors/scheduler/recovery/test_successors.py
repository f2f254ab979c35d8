"""A scheduler that takes over goes on with everything: no token is lost, changed or told twice."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import DetokenizerLost, DetokenizersLive, Input, Output, ReplicaResult, ToJournal
from pagebus.actors.scheduler.recovery.journal import Ledger, checkpoint
from pagebus.bus.contract import EntryId
from pagebus.bus.messages import Checkpoint, RequestMoved, RequestsDone, SequencesNamed, SequenceStarted, StepResult
from tests.actors.scheduler.world import World, come_back, prompt, request


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
            ledger.add_result(result)
        outputs = ledger.outputs()
        self.core = Core(dataclasses.replace(self.core.config, epoch=self.core.config.epoch + 1))
        done = {name for each in late if isinstance(each, RequestsDone) for name in each.request_ids}
        for sequence_id, heard in list(self.heard.items()):
            if heard.started.request_id not in self.over | done:
                self.known[heard.started.request_id, heard.started.choice_index] = heard.tokens
                del self.heard[sequence_id]
        self.core.handle(DetokenizersLive(("text",)))
        for name, message in self.requests.items():
            if name not in self.over:
                self.core.readmit(message, outputs.get(name, {}))
        for executor in self.executors.values():
            executor.follow(self.core.config.epoch)
            self.core.handle(executor.joined)
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
    ledger.add_result(
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
