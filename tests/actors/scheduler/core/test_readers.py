"""Several ingresses read one request: what the core tells whom, and until when it is kept."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from msgspec.structs import replace

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import (
    DetokenizerLost,
    DetokenizersLive,
    IngressLost,
    Output,
    ToDetokenizer,
    ToIngress,
    ToJournal,
)
from pagebus.actors.scheduler.recovery.journal import Ledger, checkpoint
from pagebus.actors.scheduler.recovery.takeover import Recovered
from pagebus.bus.messages import (
    AbortRequest,
    AlsoReads,
    CancelRequest,
    RequestFailed,
    RequestMoved,
    RequestsDone,
    SequenceStarted,
    TokenizedRequest,
)
from tests.actors.scheduler.world import World, prompt, request

KEPT_S = 30.0


class ReadersWorld(World):
    """Clients at ingresses: each says that it has everything once it was told the end, unless they are ``slow``."""

    def __init__(self, *, slow: bool = False) -> None:
        super().__init__(resume_timeout_s=KEPT_S)
        self.slow = slow
        self.attempts: dict[str, dict[str, str]] = defaultdict(dict)
        """Of each request, the attempt of each ingress at which somebody reads it."""
        self.told: dict[str, list[RequestFailed]] = defaultdict(list)
        """Failures by ingress."""
        self.answered: dict[tuple[str, str], list[int]] = {}
        """The whole answer, by request and ingress."""
        self.journal: list[RequestMoved] = []
        self.asked = 0

    def message(self, name: str, ingress: str, *, asked: int | None = None, **sampling: int) -> TokenizedRequest:
        """An attempt that shares the request with others; asked after all before, or at that place."""
        self.asked += 1
        asked = self.asked if asked is None else asked
        message = self.requests.get(name) or request(name, prompt(4), **sampling)
        return replace(message, ingress=ingress, attempt=f"{ingress}-{asked}", asked=asked, shared=True)

    def ask(self, name: str, ingress: str, **options: int) -> list[SequenceStarted]:
        """Somebody asks there; what is announced of it."""
        message = self.message(name, ingress, **options)
        self.attempts[name][ingress] = message.attempt
        return announced(self.send(message))

    def leave(self, name: str, ingress: str, *, may_return: bool = True) -> list[Output]:
        attempt = self.attempts[name].pop(ingress)
        self.core.handle(AbortRequest(request_id=name, attempt=attempt, may_return=may_return))
        return self.send()

    def has(self, name: str, ingress: str) -> list[Output]:
        """All of it is with the client there."""
        return self.send(RequestsDone(request_ids=(name,), attempts=(self.attempts[name].pop(ingress),)))

    def _receive(self, output: Output) -> None:
        if isinstance(output, ToIngress):
            self.told[output.ingress].append(output.message)
            self.failed[output.message.request_id] = output.message
        elif isinstance(output, ToJournal) and isinstance(output.message, RequestMoved):
            self.journal.append(output.message)
        else:
            super()._receive(output)

    def _done(self, name: str) -> list[RequestsDone]:
        (heard,) = (each for each in self.heard.values() if each.started.request_id == name and not each.aborted)
        reached = [each for each in to(heard.started) if each in self.attempts[name]]
        self.answered |= {(name, ingress): heard.tokens for ingress in reached}
        if self.slow:
            return []
        attempts = tuple(self.attempts[name].pop(ingress) for ingress in reached)
        return [RequestsDone(request_ids=(name,) * len(attempts), attempts=attempts)]

    def ledger(self) -> Ledger:
        ledger = Ledger()
        for entry in self.journal:
            ledger.read(entry)
        return ledger


def announced(outputs: list[Output]) -> list[SequenceStarted]:
    messages = [output.message for output in outputs if isinstance(output, ToDetokenizer)]
    return [message for message in messages if isinstance(message, SequenceStarted)]


def to(started: SequenceStarted) -> tuple[str, ...]:
    return started.ingress, *started.others


def shared_by(*ingresses: str, slow: bool = False, steps: int = 2) -> ReadersWorld:
    """A request ``a`` that runs, and is read at these."""
    world = ReadersWorld(slow=slow)
    world.join()
    for ingress in ingresses:
        world.ask("a", ingress, max_tokens=12)
        for _ in range(steps):
            world.step()
    return world


def test_who_joins_is_told_everything_and_nobody_is_turned_away() -> None:
    """The text is made from the first token on, for all; what runs is computed once."""
    world = shared_by("in-0")
    announcements = world.ask("a", "in-1")
    while not announcements:
        result = world.step()
        announcements = [heard.started for heard in world.heard.values() if heard.started.others]
        assert len(result.sequence_ids) <= 1
    assert to(announcements[0]) == ("in-1", "in-0")
    assert len(announcements[0].output_token_ids) >= 2
    world.run()
    assert not world.told
    assert world.answered["a", "in-0"] == world.answered["a", "in-1"]
    world.check_end()


@pytest.mark.parametrize("first", ["in-0", "in-1"])
def test_it_is_over_with_the_last_who_has_it(first: str) -> None:
    """Until then it is kept, and can be told again."""
    world = shared_by("in-0", "in-1", slow=True)
    world.run()
    world.has("a", first)
    assert "a" in world.core.delivery.finished
    world.send(DetokenizerLost("text"), DetokenizersLive(("text",)))
    world.has("a", "in-1" if first == "in-0" else "in-0")
    world.check_end()


@pytest.mark.parametrize("may_return", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_it_is_given_up_with_the_last_who_leaves(may_return: bool, lost: bool) -> None:
    """The first to leave changes nothing, however he leaves. If he may come back, all have gone only then."""
    world = shared_by("in-0", "in-1")
    num_started = len(world.heard)
    if lost:
        world.attempts["a"].pop("in-1")
        world.send(IngressLost("in-1"))
    else:
        world.leave("a", "in-1", may_return=may_return)
    world.step()
    assert len(world.heard) == num_started
    assert not any(heard.aborted for heard in world.heard.values())
    world.aborted.add("a")
    world.leave("a", "in-0", may_return=False)
    assert ("a" in world.core.requests) == (lost or may_return)
    world.now_s += KEPT_S + 1
    world.send()
    world.run()
    world.check_end()


def test_it_is_dropped_when_its_detokenizer_gives_it_up() -> None:
    """That has told an error to all who read it, and names their attempts as they were announced."""
    world = shared_by("in-0", "in-1")
    (started,) = (each.started for each in world.heard.values() if not each.aborted)
    assert (to(started), started.attempts) == (("in-1", "in-0"), ("in-1-2", "in-0-1"))
    for attempt in started.attempts:
        world.core.handle(AbortRequest(request_id="a", attempt=attempt, reason="tokens were lost"))
    assert not world.core.knows("a")


def test_an_answer_is_kept_for_whose_ingress_has_died() -> None:
    """The other one has it all by then. Its client comes back to a third ingress, and finds it."""
    world = shared_by("in-0", "in-1")
    world.attempts["a"].pop("in-1")
    world.send(IngressLost("in-1"))
    world.run()
    assert ("a", "in-0") in world.answered
    num_plans = len(world.plans)
    (started,) = world.ask("a", "in-2")
    assert to(started) == ("in-2",)
    assert len(started.output_token_ids) == 12
    assert len(world.plans) == num_plans
    assert world.answered["a", "in-2"] == world.answered["a", "in-0"]
    world.check_end()


def test_a_failure_is_told_to_all_who_read() -> None:
    """Once each; not to those that have left."""
    world = shared_by("in-0", "in-1", "in-2", steps=1)
    world.leave("a", "in-1")
    world.send(CancelRequest(request_id="a"))
    assert {ingress: len(told) for ingress, told in world.told.items()} == {"in-0": 1, "in-2": 1}
    world.run()
    world.aborted.add("a")
    world.failed.clear()
    world.check_end()


def test_a_request_that_is_not_shared_is_taken_away_from_all() -> None:
    """They are told to ask again."""
    world = shared_by("in-0", "in-1")
    alone = replace(world.message("a", "in-2"), shared=False)
    world.send(alone)
    assert {ingress: [each.attempt for each in told] for ingress, told in world.told.items()} == {
        "in-0": ["in-0-1"],
        "in-1": ["in-1-2"],
    }
    world.failed.clear()
    world.attempts["a"] = {"in-2": alone.attempt}
    world.run()
    assert ("a", "in-2") in world.answered
    world.check_end()


def test_what_was_held_up_on_its_way() -> None:
    """An attempt of another ingress joins, whatever its place. One of an ingress that has asked since does not, nor
    what was aborted before it came."""
    world = ReadersWorld()
    world.join()
    world.ask("a", "in-0", asked=5, max_tokens=12)
    world.step()
    world.send(world.message("a", "in-0", asked=4))
    world.core.handle(AbortRequest(request_id="a", attempt="in-1-3", may_return=True))
    world.send(world.message("a", "in-1", asked=3))
    assert [each.attempt for each in world.core.requests["a"].readers] == ["in-0-5"]
    world.ask("a", "in-2", asked=2)
    world.send(world.message("a", "in-0", asked=1))
    assert sorted(each.attempt for each in world.core.requests["a"].readers) == ["in-0-5", "in-2-2"]
    world.run()
    assert not world.told
    assert world.answered["a", "in-2"] == world.answered["a", "in-0"]
    world.check_end()


def test_another_request_is_refused_where_it_was_asked() -> None:
    """Those who read are not disturbed."""
    world = shared_by("in-0", "in-1")
    other = replace(world.message("a", "in-2"), prompt_token_ids=request("a", prompt(5)).prompt_token_ids)
    world.send(other)
    assert {ingress: [each.status for each in told] for ingress, told in world.told.items()} == {"in-2": [422]}
    world.failed.clear()
    world.run()
    assert world.answered.keys() == {("a", "in-0"), ("a", "in-1")}
    world.check_end()


@pytest.mark.parametrize("summed_up", [True, False])
def test_a_successor_knows_all_readers(summed_up: bool) -> None:
    """Those that were there last, by a checkpoint or by what was noted since; and who has asked after that."""
    world = shared_by("in-0", "in-1", "in-2", steps=1)
    world.leave("a", "in-2")
    ledger = world.ledger()
    if summed_up:
        ledger = Ledger()
        ledger.read(checkpoint(world.core, {}, {}, ingresses=(), detokenizers=()))
    assert ledger.moved["a"].asked == 3
    entry = world.message("a", "in-2", asked=3)
    later = world.message("a", "in-0", asked=4)

    first, others, _ = Recovered(ledger).claim(entry)
    assert (first.ingress, first.attempt) == ("in-1", "in-1-2")
    assert others == (AlsoReads(ingress="in-0", attempt="in-0-1", asked=1),)
    ledger.moved["a"] = world.journal[-1]
    last, others, _ = Recovered(ledger).claim(later)
    assert (last.ingress, last.attempt, last.asked) == ("in-0", "in-0-4", 4)
    assert [each.ingress for each in others] == ["in-1"]

    core = Core(world.core.config)
    core.readmit(first, {}, (AlsoReads(ingress="in-0", attempt="in-0-1", asked=1),))
    assert core.requests["a"].readers.ingresses == ("in-1", "in-0")


@pytest.mark.parametrize("seed", range(60))
def test_whoever_stays_gets_everything(seed: int) -> None:
    """Random comings and goings, of ingresses, detokenizers and executors: who does not leave has the whole answer, and
    nothing is kept after that."""
    rng = random.Random(seed)
    world = ReadersWorld()
    world.join(num_blocks=rng.choice([14, 64]), max_num_seqs=rng.randint(1, 4))
    names = [f"r{number}" for number in range(3)]
    staying: dict[str, set[str]] = defaultdict(set)
    for name in names:
        world.ask(name, "in-0", max_tokens=rng.randint(4, 20), ignore_eos=True)
        staying[name].add("in-0")
    for _ in range(40):
        name, ingress = rng.choice(names), f"in-{rng.randrange(4)}"
        match rng.choice(("step", "step", "step", "ask", "leave", "lose", "detokenizer", "kill")):
            case "step" if any(executor.queue for executor in world.executors.values()):
                world.step()
            case "ask" if world.core.knows(name):
                world.ask(name, ingress)
                staying[name].add(ingress)
            case "leave" if ingress in world.attempts[name] and len(world.attempts[name]) > 1:
                world.leave(name, ingress, may_return=rng.random() < 0.5)
                staying[name].discard(ingress)
            case "lose" if all(set(world.attempts[each]) - {ingress} for each in names if world.core.knows(each)):
                for each in names:
                    if world.attempts[each].pop(ingress, None):
                        staying[each].discard(ingress)
                world.send(IngressLost(ingress))
            case "detokenizer":
                world.send(DetokenizerLost("text"), DetokenizersLive(("text",)))
            case "kill" if rng.random() < 0.3 and world.num_kills < 2:
                (executor,) = world.executors
                world.kill(executor)
                world.join(name=f"again-{world.num_kills}")
            case _:
                pass
    world.run()
    assert {(name, ingress) for name in names for ingress in staying[name]} <= world.answered.keys()
    assert not world.told
    world.now_s += KEPT_S + 1
    world.aborted |= set(world.core.delivery.finished)
    world.send()
    world.check_end()
