"""Output that is lost on its way is made again: whatever happens to detokenizers, ingresses and clients."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.scheduler.core.delivery import SILENT_S
from pagebus.actors.scheduler.events import (
    DetokenizerLost,
    DetokenizersLive,
    IngressLost,
    Output,
    ReplicaLost,
    ToDetokenizer,
)
from pagebus.bus.messages import AbortRequest, CancelRequest, RequestsDone, SequenceEnded, SequenceStarted
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.world import World, again, come_back, prompt, request

KEPT_S = 30.0


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
    counts = replica.counts
    assert (counts.num_parked, counts.num_swaps, counts.num_recomputes, world.core.num_preemptions) == (1, 0, 0, 0)
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
    scored = [new for _, plan in world.plans for new in plan.new_sequences if new.sampling.prompt_logprobs is not None]
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


@pytest.mark.parametrize("why", ["leaves", "is silent", "is cancelled"])
def test_what_has_ended_is_void_when_nobody_wants_it_any_more(why: str) -> None:
    """Its results may be lost to its detokenizer, which was behind when the server of the bus was set back: it would
    wait for the end for ever."""
    world = World(resume_timeout_s=KEPT_S)
    world.join()
    world._done = lambda name: []  # type: ignore[method-assign]
    world.stop_at[("a", 1)] = 2
    world.send(request("a", prompt(4), n=2, max_tokens=10))
    for _ in range(5):
        world.step()
    if why == "is cancelled":
        world.send(CancelRequest(request_id="a"))
    else:
        world.run()
        world.now_s += SILENT_S + 1
        world.send(*([AbortRequest(request_id="a")] if why == "leaves" else []))
    assert [heard.aborted for heard in world.heard.values()] == [True, True]
    assert not world.core.delivery.finished


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
    world.core.handle(AbortRequest(request_id="a"))
    world.core.handle(RequestsDone(request_ids=("a",), attempts=("",)))
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
    world.core.handle(AbortRequest(request_id="a", may_return=True))
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
    world.core.handle(again(request("a", prompt(5), max_tokens=5)))
    world.send()
    assert world.failed.pop("a").status == 422
    world.run()
    world.check_end()
