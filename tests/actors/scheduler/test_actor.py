"""The scheduler actor on a memory bus, with fake executors behind real streams."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import time

import pytest

from pagebus.actors.scheduler.actor import SchedulerActor
from pagebus.actors.telemetry import logs
from pagebus.bus.contract import FENCE_INDEX, START, EntryId, Fenced, LogEntry, ServerRolledBack
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.messages import (
    HOLD_NONE,
    HOLD_WAIT,
    HoldRequested,
    ReplicaFenced,
    RequestFailed,
    SchedulerLeads,
    SequenceStarted,
)
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.fake_model import expected_tokens
from tests.actors.scheduler.served_scheduler import NAMES, PROMPT, TTL_S, Deployment, ask, done
from tests.helpers.waiting import until, until_empty


async def test_a_request_runs_over_the_bus_and_leaves_nothing() -> None:
    """All tokens come, and every stream is empty once everybody has read it."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        await deployment.send(ask("a", max_tokens=20))
        await until(lambda: len(deployment.tokens()) == 20)
        assert deployment.tokens() == expected_tokens(PROMPT, 20)

        results = NAMES.results("gpu-0")
        assert await deployment.bus.length(results) > 0
        await until(lambda: deployment.scheduler.core.is_idle)
        assert await deployment.bus.length(NAMES.tokenized) == 1, "it is kept until its client has everything"
        await deployment.send(done("a"))
        await deployment.tell_positions()
        streams = NAMES.tokenized, NAMES.control, NAMES.journal, NAMES.steps("gpu-0"), results
        await until_empty(deployment.bus, *streams)
        assert set(deployment.scheduler.core.leftovers().values()) == {0}
        deployment.scheduler.core.check_integrity()


async def test_results_are_kept_until_the_detokenizer_has_read_them() -> None:
    """A detokenizer that has not said how far it is loses nothing."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        await deployment.send(ask("a", max_tokens=5))
        await until(lambda: deployment.scheduler.core.is_idle and len(deployment.tokens()) == 5)
        await until_empty(deployment.bus, NAMES.steps("gpu-0"))
        assert await deployment.bus.length(NAMES.results("gpu-0")) == len(deployment.results)


async def test_a_dead_executor_is_fenced_and_its_sequences_move() -> None:
    """The lease ends: a fence closes the results, and another executor goes on with the next token."""
    async with Deployment().running() as deployment:
        await deployment.add_executor("gpu-0")
        deployment.pause_after = 20
        await deployment.send(ask("a", max_tokens=400))
        await until(lambda: len(deployment.tokens()) > 10)
        await deployment.stop_executor("gpu-0")
        deployment.pause_after = None
        await deployment.bus.release_lease("executor", "gpu-0", deployment.epochs["gpu-0"])
        await deployment.add_executor("gpu-1")

        await until(lambda: not deployment.scheduler.core.requests)
        deployment.scheduler.core.check_integrity()
        indexes = [int(index) for result in deployment.results for index in result.token_indexes]
        assert sorted(set(indexes)) == list(range(indexes[-1] + 1))
        last = await deployment.bus.last_id(NAMES.results("gpu-0"))
        assert last == EntryId(deployment.epochs["gpu-0"], FENCE_INDEX)
        late = LogEntry(NAMES.results("gpu-0"), EntryId(last.epoch, 10**6), deployment.results[0])
        with pytest.raises(Fenced):
            await deployment.bus.append([late])


async def test_an_executor_that_closes_its_results_is_given_up_at_once() -> None:
    """It fails, and still has its lease for a moment: its sequences move, and it does not join again."""
    async with Deployment().running() as deployment:
        await deployment.add_executor("gpu-0")
        deployment.pause_after = 6
        await deployment.send(ask("a", max_tokens=40))
        await until(lambda: len(deployment.results) == 6)
        fence = ReplicaFenced(replica="gpu-0", reason="OutOfMemoryError: no memory", error="OutOfMemoryError")
        at = EntryId(deployment.epochs["gpu-0"], FENCE_INDEX)
        await deployment.bus.append([LogEntry(NAMES.results("gpu-0"), at, fence)])
        await until(lambda: not deployment.scheduler.core.replicas)
        looked_s = deployment.scheduler._leader.lease_watch.looked_s
        await until(lambda: deployment.scheduler._leader.lease_watch.looked_s > looked_s)
        assert not deployment.scheduler.core.replicas
        await deployment.stop_executor("gpu-0")
        deployment.pause_after = None
        await deployment.add_executor("gpu-1")

        await until(lambda: not deployment.scheduler.core.requests)
        assert deployment.tokens()[-1] == expected_tokens(PROMPT, 40)[-1]
        lost = [
            (labels["error"], n) for name, labels, n in _series(deployment) if name == "pagebus:lost_executors_total"
        ]
        assert lost == [("OutOfMemoryError", {"value": 1.0})]
        resumed = [
            (labels["engine"], n)
            for name, labels, n in _series(deployment)
            if name == "pagebus:resumed_sequences_total"
        ]
        assert resumed == [("gpu-0", {"value": 1.0})]


async def test_the_lease_tells_of_a_hold_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a balancer would send requests for seconds to an ingress that refuses them."""
    renewed: list[object] = []
    monkeypatch.setattr(SchedulerActor, "renew_soon", lambda actor: renewed.append(actor.lease_info().get("held")))
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        renewed.clear()
        for mode in (HOLD_WAIT, None, HOLD_NONE):
            asked = HoldRequested(ingress="in-0", serial=1, mode=mode)
            await deployment.bus.publish([(NAMES.control, asked)])
        await until(lambda: len(renewed) == 2)
        assert renewed == [HOLD_WAIT, None]


async def test_what_cannot_be_processed_is_kept_aside() -> None:
    """An entry of the wrong kind goes to the dead letters; the next request is served."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        await deployment.send(RequestFailed(request_id="x", status=1, error_type="", message=""))
        await deployment.send(ask("a", max_tokens=3))
        await until(lambda: len(deployment.tokens()) == 3)
        await deployment.send(done("a"))
        await until_empty(deployment.bus, NAMES.tokenized)
        assert await deployment.bus.length(NAMES.dead_letters("scheduler")) == 1


async def test_a_request_that_makes_the_core_raise_fails_alone() -> None:
    """Its client gets a 500, the entry is kept aside, and others go on."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        take = deployment.scheduler.core.handle

        def fragile(message: object) -> None:
            if getattr(message, "request_id", "") == "bad":
                raise RuntimeError("a bug")
            take(message)  # type: ignore[arg-type]

        deployment.scheduler.core.handle = fragile  # type: ignore[method-assign]
        await deployment.send(ask("bad", max_tokens=3), ask("a", max_tokens=3))
        await until(lambda: len(deployment.tokens()) == 3)
        await deployment.send(done("a"))
        await until_empty(deployment.bus, NAMES.tokenized)
        failures = [each for each in await deployment.replies() if isinstance(each, RequestFailed)]
        assert [(each.request_id, each.status) for each in failures] == [("bad", 500)]


async def test_a_scheduler_whose_plans_are_lost_ends() -> None:
    """The server was started without them: an executor may wait for them for ever. The next scheduler goes on."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        deployment.pause_after = 6
        await deployment.send(ask("a", max_tokens=40))
        await until(lambda: len(deployment.results) == 6)
        deployment.scheduler.bus.on_restart()
        await until(lambda: deployment.scheduler._outbox._survived == 1)
        assert not deployment.life.done()
        for stream in (NAMES.steps("gpu-0"), NAMES.sequences("text")):
            del deployment.server.streams[stream]
        deployment.scheduler.bus.on_restart()
        await until(deployment.life.done)
        assert isinstance(deployment.life.exception(), ServerRolledBack)
        await deployment.stop_executor("gpu-0")
        await deployment.bus.release_lease("executor", "gpu-0", deployment.epochs["gpu-0"])
        deployment.pause_after = None
        await deployment.start_scheduler()
        await deployment.add_executor("gpu-1")
        await until(lambda: set(deployment.scheduler.core.delivery.finished) == {"a"})


async def test_what_to_change_about_the_bus_is_said_once_for_a_deployment() -> None:
    """By its one scheduler: other actors would repeat it."""
    out = io.StringIO()
    logs.configure("info", "json", stream=out)
    deployment = Deployment()
    bus = MemoryBus(deployment.server, NAMES)
    bus.advice = "set another policy"
    scheduler = SchedulerActor(deployment.settings, bus, "scheduler-0")
    life = asyncio.create_task(scheduler.run())
    await until(lambda: scheduler.state == "ready" or life.done())
    scheduler.request_drain()
    await life
    told = [line for line in map(json.loads, out.getvalue().splitlines()) if line["level"] == "warning"]
    assert [(line["event"], line["actor"]) for line in told] == [(bus.advice, "scheduler-0")]


async def test_a_detokenizer_that_comes_later_hears_who_leads() -> None:
    """Though there is nothing else to tell it: what it knows of an earlier scheduler is void."""
    async with Deployment().running() as deployment:
        await deployment.bus.acquire_lease("detokenizer", "late", {"state": "ready"}, ttl_s=TTL_S)
        (entry,) = await deployment.bus.read({NAMES.sequences("late"): START}, block_ms=20_000)
        assert entry.message == SchedulerLeads(epoch=deployment.scheduler.epoch)


async def test_a_jump_of_the_wall_clock_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has ended is kept for its client, who has said nothing yet."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        await deployment.send(ask("a", max_tokens=2))
        await until(lambda: deployment.scheduler.core.is_forgettable is False and deployment.scheduler.core.is_idle)
        deployment.scheduler._leader._news.set()
        await until(lambda: not deployment.scheduler._leader._news.is_set())
        wall_s = time.time()
        monkeypatch.setattr(time, "time", lambda: wall_s + 86_400.0)
        for _ in range(2):
            deployment.scheduler._leader._news.set()
            await until(lambda: not deployment.scheduler._leader._news.is_set())
        assert deployment.scheduler.core.delivery.finished.keys() == {"a"}
        await deployment.send(done("a"))
        await until(lambda: not deployment.scheduler.core.delivery.finished)


async def test_nobody_is_given_up_when_all_leases_vanish_at_once() -> None:
    """The scheduler's own is gone too: the clock of Redis has jumped, the actors live."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        await until(lambda: "gpu-0" in deployment.scheduler.core.replicas)
        deployment.server.leases.clear()
        looked_s = deployment.scheduler._leader.lease_watch.looked_s
        await until(lambda: deployment.scheduler._leader.lease_watch.looked_s > looked_s)
        info = dataclasses.asdict(FakeExecutor(name="gpu-0", block_size=16, num_blocks=64, max_model_len=1024).joined)
        held = await deployment.bus.renew_lease(
            "executor", "gpu-0", deployment.epochs["gpu-0"], info | {"state": "ready"}, ttl_s=TTL_S
        )
        assert not held
        await deployment.tell_positions()
        await deployment.send(ask("a", max_tokens=2))
        await until(lambda: len(deployment.tokens()) == 2)


async def test_another_detokenizer_takes_over() -> None:
    """It is told of the sequence with all tokens that there are, and the request goes on."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        deployment.pause_after = 6
        await deployment.send(ask("a", max_tokens=30))
        await until(lambda: len(deployment.tokens()) > 3)
        await deployment.bus.acquire_lease("detokenizer", "other", {"state": "ready"}, ttl_s=TTL_S)
        await deployment.bus.release_lease("detokenizer", "text", deployment.detokenizer_epoch)
        await until(lambda: deployment.scheduler.core.delivery.detokenizers == ("other",))
        deployment.pause_after = None
        await until(lambda: len(deployment.tokens()) == 30)
        leads, started = await deployment.bus.read({NAMES.sequences("other"): START})
        assert isinstance(leads.message, SchedulerLeads)
        assert isinstance(started.message, SequenceStarted)
        known = started.message.output_token_ids.tolist()
        assert len(known) >= 4
        assert known == expected_tokens(PROMPT, 30)[: len(known)]


@pytest.mark.parametrize("executor_dies", [False, True])
async def test_a_successor_takes_over_with_every_token(executor_dies: bool) -> None:
    """The scheduler vanishes while a request runs: the next one goes on with the next token, on whoever is there."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        deployment.pause_after = 6
        await deployment.send(ask("a", max_tokens=40), ask("b", max_tokens=3))
        await until(lambda: len(deployment.results) == 6)
        await deployment.lose_scheduler()
        if executor_dies:
            await deployment.stop_executor("gpu-0")
            await deployment.bus.release_lease("executor", "gpu-0", deployment.epochs["gpu-0"])
            await deployment.add_executor("gpu-1")
        deployment.pause_after = None
        await deployment.start_scheduler()
        core = deployment.scheduler.core
        await until(lambda: set(core.delivery.finished) == {"a", "b"})
        for request in core.delivery.finished.values():
            output = request.sequences[0].tokens[len(PROMPT) :]
            assert output.tolist() == expected_tokens(PROMPT, request.sampling.max_tokens or 0)
        indexes = [int(index) for result in deployment.results for index in result.token_indexes]
        assert len(indexes) == 43, "every token was computed once"
        await until(lambda: core.is_idle)
        if executor_dies:
            del deployment.positions["results:gpu-0"]  # a detokenizer says nothing of what it has read to the end
        await deployment.send(done("a", "b"))
        await deployment.tell_positions()
        streams = [NAMES.steps(name) for name in deployment.epochs] + [
            NAMES.results(name) for name in deployment.epochs
        ]
        await until_empty(deployment.bus, NAMES.tokenized, NAMES.control, NAMES.journal, *streams)
        assert set(core.leftovers().values()) == {0}


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_is_lost_to_detokenizers_is_told_them(restarted: bool) -> None:
    """The scheduler has read a result before the bus lost it. Its executor ends for that; who has not read it hears of
    the token with the sequence, which is announced anew."""
    async with Deployment().running() as deployment:
        await deployment.add_executor("gpu-0")
        deployment.pause_after = 6
        await deployment.send(ask("a", max_tokens=20))
        await until(lambda: len(deployment.results) == 6)
        await until(lambda: deployment.scheduler._leader._results.positions["gpu-0"].index == 6)
        await deployment.tell_positions()
        await until(lambda: "results:gpu-0" in deployment.scheduler._leader.membership.positions.get("text", {}))
        if restarted:
            deployment.scheduler.bus.on_restart()
        await deployment.stop_executor("gpu-0")
        await deployment.bus.release_lease("executor", "gpu-0", deployment.epochs["gpu-0"])
        deployment.pause_after = None
        await deployment.add_executor("gpu-1")
        await until(lambda: set(deployment.scheduler.core.delivery.finished) == {"a"})
        told = [entry.message for entry in await deployment.bus.read({NAMES.sequences("text"): START})]
        started = [len(each.output_token_ids) for each in told if isinstance(each, SequenceStarted)]
        assert started == ([0, len(deployment.results[:6])] if restarted else [0])


async def test_metrics_tell_what_runs() -> None:
    """Series have vLLM's names and the replica as engine."""
    async with Deployment().running() as deployment:
        await deployment.add_executor()
        await deployment.send(ask("a", max_tokens=5))
        await until(lambda: len(deployment.tokens()) == 5)
        await until(lambda: any("prefix_cache_queries" in name for name, _, _ in _series(deployment)))
        names = {name for name, labels, _ in _series(deployment) if labels.get("engine") == "gpu-0"}
        assert names >= {
            "vllm:num_requests_running",
            "vllm:kv_cache_usage_perc",
            "vllm:prefix_cache_queries",
            "vllm:prefix_cache_hits",
            "vllm:num_preemptions",
            "vllm:external_prefix_cache_queries",
            "vllm:external_prefix_cache_hits",
            "pagebus:swapped_out_blocks_total",
            "pagebus:swapped_in_blocks_total",
            "pagebus:given_back_blocks_total",
            "pagebus:pulled_blocks_total",
            "pagebus:lent_blocks_total",
            "pagebus:host_cache_usage_perc",
            "vllm:iteration_tokens_total",
        }


def _series(deployment: Deployment) -> list[tuple[str, dict[str, str], object]]:
    return [tuple(each) for each in deployment.scheduler.metrics.snapshot()["series"]]


async def test_a_lease_from_the_past_does_not_stop_its_executor() -> None:
    """A server that comes back with what it had stored a while ago may say once more that it loads."""
    async with Deployment().running() as deployment:
        await deployment.add_executor("gpu-0")
        await until(lambda: deployment.scheduler.core.replicas)
        for state in ("loading", "ready"):
            epoch, looked_s = deployment.epochs["gpu-0"], deployment.scheduler._leader.lease_watch.looked_s
            await deployment.bus.renew_lease("executor", "gpu-0", epoch, {"state": state}, ttl_s=TTL_S)
            await until(lambda before=looked_s: deployment.scheduler._leader.lease_watch.looked_s > before)
        await deployment.send(ask("a", max_tokens=4))
        await until(lambda: set(deployment.scheduler.core.delivery.finished) == {"a"})
