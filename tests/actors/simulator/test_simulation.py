"""Simulated runs: times follow from the profile, tokens are conserved whatever happens, and runs repeat exactly."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest

from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.settings import Settings
from pagebus.actors.simulator.clients import Slo
from pagebus.actors.simulator.deployment import Deployment, core_config
from pagebus.actors.simulator.faults import Fault, FaultError, parse_faults
from pagebus.actors.simulator.profile import Profile
from pagebus.actors.simulator.recording.trace import Trace, make_trace
from pagebus.actors.simulator.report import make_report, table
from pagebus.actors.simulator.watch import Recorder, StepLog
from pagebus.actors.simulator.workloads import make_workload

pytestmark = pytest.mark.share(6)

PROFILE = Profile(
    num_blocks=600,
    max_model_len=8192,
    kv_bytes_per_token=1000,
    base_tokens=(1, 100, 1000),
    base_ms=(2.0, 4.0, 40.0),
    kv_read_bytes_per_s=1e9,
    attention_flops_per_pair=100.0,
    attention_flops_per_s=1e12,
    bus_s=0.0001,
    request_s=0.003,
    reply_s=0.002,
)


def run(
    trace: Trace,
    profile: Profile = PROFILE,
    *,
    faults: str = "",
    executors: int = 1,
    acceptance: float = 0.0,
    **settings: Any,
) -> Deployment:
    """A run with all checks."""
    deployment = Deployment(
        trace, profile, Settings(**settings), num_executors=executors, faults=parse_faults(faults), check=True,
        acceptance=acceptance,
    )  # fmt: skip
    deployment.run()
    return deployment


def test_one_request_takes_what_the_profile_says() -> None:
    """Time to first token and between tokens of a lone request are the sums of their parts."""
    deployment = run(make_trace(100, 4))
    clients = deployment.clients
    prefill_s = 0.004 + 100 * 101 / 2 * 1e-10
    decodes_s = [0.002 + context * 1e-6 for context in (101, 102, 103)]
    assert clients.ttft.mean == pytest.approx(0.003 + 0.0001 + prefill_s + 0.002, rel=1e-9)
    assert clients.itl.mean == pytest.approx(sum(decodes_s) / 3, rel=1e-9)
    assert clients.itl.count == 3
    assert clients.e2e.mean == pytest.approx(0.0051 + prefill_s + sum(decodes_s), rel=1e-9)


@pytest.mark.parametrize("clients", [0, 1])
def test_what_does_not_fit_into_the_context_fails(clients: int) -> None:
    """As tokenizers refuse it; the others are served, and the client sends its next request."""
    deployment = run(make_trace([100, 100, 60], [4, 30, 4], clients=clients), max_model_len=104)
    assert make_report(deployment)["requests"] == {"sent": 3, "done": 2, "failed": 1, "unserved": 0}


WINDOWS = [({"window": 30}, 0, 1), ({"windowed_pages": 3, "windowed_tokens": 30}, 0.25, 4)]


@pytest.mark.parametrize(("windows", "everything", "pages"), WINDOWS)
def test_layers_with_windows_read_less(windows: dict[str, int], everything: float, pages: int) -> None:
    """All layers, or three quarters of them; what lies behind the window is given back."""
    deployment = run(make_trace(100, 4), dataclasses.replace(PROFILE, **windows))
    full_pairs, seen = 100 * 101 / 2, 30 * 31 / 2 + 70 * 30
    prefill_s = 0.004 + (everything * full_pairs + (1 - everything) * seen) * 1e-10
    decodes_s = [0.002 + (everything * context + (1 - everything) * 30) * 1e-6 for context in (101, 102, 103)]
    assert deployment.clients.ttft.mean == pytest.approx(0.0051 + prefill_s, rel=1e-9)
    assert deployment.clients.itl.mean == pytest.approx(sum(decodes_s) / 3, rel=1e-9)
    (replica,) = deployment.simulation.core.replicas.values()
    assert (replica.num_pages, replica.counts.num_given_back) == (pages, 4 * max(1, pages - 1))


def test_without_pipelining_every_step_waits_for_the_bus() -> None:
    """One plan in flight: result and next plan lie between two steps."""
    lone = run(make_trace(100, 4), pipeline_depth=1).clients
    piped = run(make_trace(100, 4), pipeline_depth=2).clients
    assert lone.itl.mean == pytest.approx(piped.itl.mean + 2 * PROFILE.bus_s, rel=1e-9)


def test_a_busy_scheduler_delays_plans() -> None:
    """What comes while the scheduler works waits for it."""
    slow = dataclasses.replace(PROFILE, scheduler_plan_s=0.01)
    assert run(make_trace(100, 20), slow).clients.itl.mean == pytest.approx(0.01, rel=0.1)


def test_the_same_run_gives_the_same_report() -> None:
    """A seed says everything; another seed is another run."""
    reports = [make_report(run(make_workload("chat", seed=seed, requests=8))) for seed in (1, 1, 2)]
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline_depth": 1},
        {"enable_prefix_caching": False},
        {"preemption_mode": "recompute"},
        {"swap_space": 0.0},
    ],
    ids=str,
)
def test_tokens_are_conserved_in_a_small_cache(settings: dict[str, Any]) -> None:
    """With preemptions, forks and early ends, every request gets exactly its tokens and nothing is left."""
    count = 40
    trace = make_trace(
        [20 + 7 * (i % 9) for i in range(count)],
        [10 + 5 * (i % 11) for i in range(count)],
        [i * 0.004 for i in range(count)],
        max_tokens=[90 if i % 3 == 0 else 10 + 5 * (i % 11) for i in range(count)],
        choices=[3 if i % 5 == 0 else 1 for i in range(count)],
    )
    profile = dataclasses.replace(PROFILE, num_blocks=24)
    deployment = run(trace, profile, max_num_seqs=8, max_num_batched_tokens=64, **settings)
    clients, core = deployment.clients, deployment.simulation.core
    assert (clients.num_done, clients.num_failed, clients.num_unserved) == (count, 0, 0)
    assert clients.output_tokens == int((trace.output_tokens * trace.choices).sum())
    assert core.is_idle
    assert core.num_preemptions > 0
    held = core.leftovers()
    assert {name: held[name] for name in held if "host" not in name} == {name: 0 for name in held if "host" not in name}


def test_executors_come_and_go() -> None:
    """Killed, drained and added executors change when tokens come, not which."""
    trace = make_workload("chat", requests=24, rate=50.0)
    deployment = run(trace, executors=3, faults="kill executor-1 at 0.2; add 2 at 0.3; drain executor-0 at 0.4")
    clients = deployment.clients
    assert clients.num_done == 24
    assert clients.output_tokens == int(trace.output_tokens.sum())
    report = make_report(deployment)
    assert [each["name"] for each in report["executors"]] == [f"executor-{i}" for i in range(5)]
    assert all(each["steps"] for each in report["executors"])


def test_requests_wait_for_an_executor() -> None:
    """Without any executor left requests are unserved; a later one serves them."""
    trace = make_trace([50] * 4, [10] * 4)
    assert run(trace, faults="kill executor-0 at 0.01").clients.num_unserved == 4
    assert run(trace, faults="kill executor-0 at 0.01; add 1 at 60").clients.num_done == 4


def test_what_was_computed_before_a_loss_is_not_sent_again() -> None:
    """After a loss a stream has a gap as long as it takes to notice, and goes on with the next token."""
    trace = make_trace(50, 100)
    clients = run(trace, executors=2, faults="kill executor-0 at 0.1", lease_ttl_s=5.0).clients
    assert clients.itl.count == 99
    assert 5.0 < clients.itl.percentile(1.0) < 5.1


def test_clients_send_one_after_another() -> None:
    """With clients, as many requests are under way as there are clients."""
    one, four = (run(make_trace([64] * 8, [5] * 8, clients=number)).clients for number in (1, 4))
    assert one.num_done == four.num_done == 8
    assert one.e2e.mean * 8 == pytest.approx(one.last_token_s, rel=1e-6)
    assert four.last_token_s < one.last_token_s / 2


def test_shared_prefixes_are_found() -> None:
    """Requests of a group find each other's blocks, others do not."""
    alone = make_trace([160] * 10, [2] * 10, [i * 0.5 for i in range(10)])
    group = make_trace([160] * 10, [2] * 10, [i * 0.5 for i in range(10)], prefix_groups=0, prefix_tokens=128)
    assert make_report(run(alone))["prefix_hit_rate"] == 0
    assert make_report(run(group))["prefix_hit_rate"] == pytest.approx(9 * 128 / 1600, rel=1e-4)


def test_goodput_counts_requests_that_keep_the_limits() -> None:
    """A limit below what is possible leaves no good request, one above leaves all."""
    trace = make_trace([100] * 3, [4] * 3, [0.0, 1.0, 2.0])
    for slo, good in ((Slo(0.02, 0.01), 3), (Slo(0.005, 0.01), 0), (Slo(0.02, 0.002), 0)):
        deployment = Deployment(trace, PROFILE, Settings(), slo=slo)
        deployment.run()
        assert deployment.clients.num_good == good


def test_what_cannot_run_fails() -> None:
    """A prompt longer than the context is answered with an error, and the rest goes on."""
    deployment = run(make_trace([9000, 10], [5, 5]))
    assert (deployment.clients.num_failed, deployment.clients.num_done) == (1, 1)
    assert "1 failed" in table(make_report(deployment))


def test_faults_are_read() -> None:
    """Faults are parsed into order of time; nonsense and unknown executors are refused."""
    assert parse_faults("add 2 at 20; kill executor-3 at 12.5;") == [
        Fault("kill", 12.5, executor="executor-3"),
        Fault("add", 20.0, count=2),
    ]
    with pytest.raises(FaultError, match="write 'kill NAME"):
        parse_faults("explode executor-1")
    with pytest.raises(FaultError, match="no executor 'executor-7'"):
        run(make_trace(1, 1), faults="kill executor-7 at 1")


def test_the_core_is_configured_as_in_a_deployment() -> None:
    """Every setting of the core comes from the settings of the same meaning."""
    settings = Settings(itl_target_ms=20.0, scheduling_policy="priority", pipeline_depth=3, block_size=32)
    config = core_config(settings)
    assert (config.itl_target_s, config.priorities, config.pipeline_depth, config.block_size) == (0.02, True, 3, 32)
    own = {"epoch", "eos_token_ids", "vocab_size", "priorities", "window", "num_prefill", "auto_roles"}
    fields = {spec.name for spec in dataclasses.fields(CoreConfig)} - own
    assert [name for name in fields if not hasattr(settings, name) and not hasattr(settings, name[:-1] + "ms")] == []


def test_a_burst_waits_for_the_tokenizer() -> None:
    """It takes what is there: the first request alone, then all that came meanwhile, which arrive together."""
    slow = dataclasses.replace(PROFILE, tokenizer_token_s=1e-4)
    alone, burst = (run(make_trace([100] * count, 1), slow).clients for count in (1, 5))
    prefill_s = 0.004 + 100 * 101 / 2 * 1e-10
    assert alone.ttft.mean == pytest.approx(0.01 + 0.003 + 0.0001 + prefill_s + 0.002, rel=1e-9)
    assert burst.ttft.percentile(0.0) == alone.ttft.percentile(0.0)
    assert burst.ttft.percentile(0.4) == pytest.approx(burst.ttft.percentile(1.0))
    assert burst.ttft.percentile(1.0) == pytest.approx(0.01 + 0.04 + 0.003 + 0.0001 + 0.016 + 0.002, rel=0.05)


def test_steps_beyond_the_graphs_take_their_time_to_launch() -> None:
    """Smaller ones do not."""
    eager = dataclasses.replace(PROFILE, graph_tokens=100, eager_floor_ms=50.0)
    for tokens, floored in ((100, False), (101, True)):
        usual_s, eager_s = (run(make_trace(tokens, 1), each).clients.ttft.mean for each in (PROFILE, eager))
        assert eager_s == (pytest.approx(0.05 + 0.0051) if floored else usual_s)


@pytest.mark.parametrize("faults", ["", "kill executor-0 at 0.4; add 1 at 0.5"])
def test_speculation(faults: str) -> None:
    """Every token comes once, also of executors that die; right drafts save steps, and wrong ones are soon left out."""
    trace = make_workload("mixed256", requests=6, seed=3)
    drafts = {"spec_method": "ngram", "spec_tokens": 4}
    reports = [
        make_report(run(trace, faults=faults, acceptance=chance, **settings))
        for chance, settings in ((0.0, {}), (0.0, drafts), (0.9, drafts), (1.0, drafts))
    ]
    plain, wrong, mostly, right = reports
    assert [each["requests"]["done"] for each in reports] == [6] * 4
    assert plain["drafts"] == {"drafted": 0, "accepted": 0}
    assert wrong["drafts"]["accepted"] == 0 < wrong["drafts"]["drafted"]
    assert wrong["duration_s"] < 1.03 * plain["duration_s"]
    assert mostly["duration_s"] < 0.8 * plain["duration_s"]
    assert right["drafts"]["accepted"] > 0.9 * right["drafts"]["drafted"]
    assert right["steps"] < 0.5 * plain["steps"]
    assert "accepted" in table(right)


def test_steps_with_drafts_are_told_and_take_as_long_as_decodes() -> None:
    """Recordings and pictures count prompts alone as prefill. Keys and values of a row with drafts are read once, also
    beside a prompt: the time follows from what the recording says of the step."""
    trace, out = make_trace([200, 300], 400, [0.0, 0.1]), io.StringIO()
    drafts = Settings(spec_method="ngram", spec_tokens=4)
    deployment = Deployment(trace, PROFILE, drafts, num_executors=1, check=True, acceptance=1.0)
    log, recorder = StepLog(deployment, out), Recorder(deployment)
    deployment.watch(log)
    deployment.watch(recorder)
    deployment.run()
    log.finish()
    steps = [row for row in map(json.loads, out.getvalue().splitlines()) if row.get("step") and row["busy_s"]]
    assert recorder.run().steps == [(row["decodes"], row["prefill_tokens"]) for row in steps]
    assert sum(row["prefill_tokens"] for row in steps) == trace.prompt_tokens.sum()
    mixed = [row for row in steps if row["decodes"] and row["prefill_tokens"]]
    base_s = PROFILE.base_table_s(4096)
    for row in mixed:
        seconds = base_s[row["decodes"] + row["prefill_tokens"]] + row["decode_context"] * PROFILE.kv_token_s
        assert row["busy_s"] == pytest.approx(seconds + row["prefill_pairs"] * PROFILE.pair_s, abs=1e-6)
    assert max(row["decodes"] for row in mixed) > 1, "of one sequence"
