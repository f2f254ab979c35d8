"""Rows with drafts: how many there are, what they take, and results that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from pagebus.actors.scheduler.core.validation import of_message
from pagebus.actors.scheduler.events import ProtocolError, ReplicaResult
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.service.metrics import SchedulerMetrics
from pagebus.actors.telemetry.metrics import Metrics
from pagebus.bus.messages import StepPlan, StepResult
from pagebus.bus.messages.requests import MOST_PREDICTION_TOKENS
from pagebus.bus.messages.steps import CONTEXT_TOKENS
from tests.actors.scheduler.drafting_executor import DraftingExecutor
from tests.actors.scheduler.fake_executor import Slot
from tests.actors.scheduler.fake_model import VOCAB, next_token, remember
from tests.actors.scheduler.world import World, prompt, request


class Prophet(DraftingExecutor):
    """All its drafts are right."""

    def _draft(self, state: Slot) -> list[int]:
        drafts, prefix = [], state.prefixes[-1]
        for _ in range(self.num_drafts):
            drafts.append(next_token(prefix))
            prefix = remember(prefix, drafts[-1])
        return drafts


def world(depth: int = 2, **options: int) -> tuple[World, DraftingExecutor]:
    made = World(pipeline_depth=depth)
    executor = Prophet(**{"depth": depth, "num_drafts": 3, **options})
    made.join(executor)
    return made, executor


def replica_of(made: World) -> Replica:
    return next(iter(made.core.replicas.values()))


def widths(plan: StepPlan) -> list[int]:
    return plan.num_scheduled[: len(plan.latest_starts)].tolist()


def test_drafts_are_planned_once_there_are_some() -> None:
    """Three in each step, which ends early; but at first a decode goes without now and then, to see what that takes."""
    made, executor = world(depth=1)
    made.send(request("a", prompt(5), max_tokens=22))
    made.run()
    made.check_end()
    assert [widths(plan) for plan in executor.plans] == [[], [1], [4], [4], [1], [4], [4], [3], []]
    acceptance = replica_of(made).step_results.acceptance
    assert (acceptance.num_drafts, acceptance.num_draft_tokens, acceptance.num_accepted) == (5, 14, 14)
    assert acceptance.accepted_at == [5, 5, 4]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_longest_case_never_passes_the_limit(depth: int) -> None:
    """The executor checks that of each plan. With more steps in flight rows wait for results near the end."""
    for max_tokens in range(1, 20):
        made, _ = world(depth)
        made.send(request("a", prompt(5), max_tokens=max_tokens), request("b", prompt(9, 1), max_tokens=max_tokens))
        made.run()
        made.check_end()


def test_decodes_without_drafts_come_first() -> None:
    """Beams have none; rows with drafts follow, then chunks of prompts."""
    made, executor = world(budget=64)
    made.send(request("a", prompt(5), max_tokens=60), request("b", prompt(5, 1), max_tokens=20, beam_width=2))
    for _ in range(6):
        made.step()
    made.send(request("c", prompt(40, 2), max_tokens=3))
    made.run()
    made.check_end()
    mixed = [plan for plan in executor.plans if plan.num_decodes and len(plan.slots) > len(plan.latest_starts)]
    assert any(max(widths(plan)) > 1 for plan in mixed)
    for plan in executor.plans:
        assert widths(plan) == sorted(widths(plan), key=lambda width: width > 1)
        assert plan.num_decodes == widths(plan).count(1)


def test_drafts_take_nothing_from_prompts() -> None:
    """A chunk gets the budget that it would have got; what is left of it is for drafts."""
    made, executor = world(budget=16, num_blocks=256)
    made.send(request("a", prompt(5), max_tokens=60))
    for _ in range(4):
        made.step()
    made.send(request("b", prompt(100, 1), max_tokens=2))
    made.run()
    made.check_end()
    chunks = [plan for plan in executor.plans if len(plan.slots) == 2 and plan.num_scheduled[1] > 4]
    assert [plan.num_scheduled.tolist() for plan in chunks[:6]] == [[1, 15]] * 6


def test_drafts_preempt_nobody() -> None:
    """Where blocks are short rows have fewer drafts, or none; whoever is preempted would be so without them too."""
    made, executor = world(num_blocks=10, max_num_seqs=2)
    made.send(request("a", prompt(9), max_tokens=12), request("b", prompt(8, 1), max_tokens=12))
    made.run()
    made.check_end()
    assert not made.preempted
    assert max(max(widths(plan), default=0) for plan in executor.plans) >= 3


@pytest.mark.parametrize(("most", "wide"), [(0, 1), (2, 3), (16, 4), (None, 4)])
def test_requests_with_a_depth_of_their_own(most: int | None, wide: int) -> None:
    """None, fewer than the server's, or as many."""
    made, executor = world(depth=1)
    made.send(request("a", prompt(5), max_tokens=22, num_speculative_tokens=most))
    made.run()
    made.check_end()
    assert max(max(widths(plan), default=0) for plan in executor.plans) == wide


def test_predictions_enter_with_their_sequence() -> None:
    """Behind the prompt's last tokens; not where nobody looks them up."""
    made, executor = world(depth=1)
    told = np.arange(1, 8, dtype=np.int32)
    for name, more in (("a", {}), ("b", {"num_speculative_tokens": 0}), ("c", {"beam_width": 2})):
        made.send(replace(request(name, prompt(70), max_tokens=3, **more), prediction_token_ids=told))
    made.send(request("d", prompt(5), max_tokens=3))
    made.run()
    entered = [new for plan in executor.plans for new in plan.new_sequences]
    assert sorted({new.num_predicted for new in entered}) == [0, CONTEXT_TOKENS + len(told)]
    (plan,) = [plan for plan in executor.plans if len(plan.new_predicted)]
    assert plan.new_predicted.tolist() == [*prompt(70)[-CONTEXT_TOKENS:], *told.tolist()]

    plain = World()
    executor = plain.join()
    plain.send(replace(request("a", prompt(70), max_tokens=3), prediction_token_ids=told))
    plain.run()
    assert not any(
        len(plan.new_predicted) or new.num_predicted for plan in executor.plans for new in plan.new_sequences
    )


def test_predictions_that_cannot_be() -> None:
    """Of tokens outside the vocabulary, or too long: the request fails alone."""
    asked = request("a", prompt(5), max_tokens=3)
    for ids in ([3, VOCAB], [-1], [1] * (MOST_PREDICTION_TOKENS + 1)):
        failure = of_message(replace(asked, prediction_token_ids=np.array(ids, np.int32)), VOCAB)
        assert failure is not None
        assert (failure.status, failure.param) == (400, "prediction")
    assert of_message(replace(asked, prediction_token_ids=np.array([1], np.int32)), VOCAB) is None


def broken(result: StepResult, kind: str) -> StepResult:
    """A result that contradicts the plan, whose last row is the end of a run of four."""
    if kind == "too many":
        columns = {name: np.append(getattr(result, name), getattr(result, name)[-1:])
                   for name in ("sequence_ids", "token_ids", "ends", "num_drafts")}  # fmt: skip
        return replace(result, **columns, token_indexes=np.append(result.token_indexes, result.token_indexes[-1:] + 1))
    if kind == "behind an end":
        return replace(result, ends=np.array([0, 1, 0, 0], np.int32))
    if kind == "a gap":
        return replace(result, token_indexes=result.token_indexes + np.array([0, 0, 1, 1], np.int32))
    if kind == "another begin":
        return replace(result, token_indexes=result.token_indexes + np.int32(1))
    return replace(result, num_drafts=np.empty(0, np.int32))


@pytest.mark.parametrize("kind", ["too many", "behind an end", "a gap", "another begin", "no drafts"])
def test_results_that_cannot_be(kind: str) -> None:
    """They are refused, and nothing has changed."""
    made, executor = world(depth=1)
    made.send(request("a", prompt(5), max_tokens=22))
    made.step()
    made.step()
    result = executor.run_one()
    assert len(result.token_ids) == 4
    with pytest.raises(ProtocolError):
        made.core.handle(ReplicaResult(executor.name, broken(result, kind)))
    made.core.check_integrity()
    made.send(ReplicaResult(executor.name, result))
    assert replica_of(made).step_results.acceptance.num_accepted == 3


def test_metrics_have_vllms_names() -> None:
    """By executor, and for those that speculate only."""
    made, _ = world(depth=1)
    made.send(request("a", prompt(5), max_tokens=22))
    made.run()
    metrics = Metrics()
    told = SchedulerMetrics(metrics)
    for _ in range(2):
        told.update(made.core)

    def count(name: str, **labels: str) -> float:
        return metrics.counter(f"vllm:spec_decode_{name}", "", engine="gpu-0", **labels).value

    assert [count(name) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")] == [5, 14, 14]
    assert [count("num_accepted_tokens_per_pos", position=str(place)) for place in range(3)] == [5, 5, 4]

    plain, metrics = World(), Metrics()
    plain.join()
    SchedulerMetrics(metrics).update(plain.core)
    assert "spec_decode" not in str(metrics.snapshot())
