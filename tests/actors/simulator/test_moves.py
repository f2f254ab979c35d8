"""Moves in the simulator: pulled prefixes, drains, roles, and whether the scheduler pulls blocks just when it pays."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from pagebus.actors.commands.cli import main
from pagebus.actors.scheduler.moves.link import Link
from pagebus.actors.settings import Settings
from pagebus.actors.simulator.deployment import Deployment
from pagebus.actors.simulator.faults import parse_faults
from pagebus.actors.simulator.links import LinkSpeed
from pagebus.actors.simulator.profile import load_profile
from pagebus.actors.simulator.recording.trace import Trace, make_trace
from pagebus.actors.simulator.report import make_report, table

H200 = load_profile("h200-llama8b")
NVLINK = 2000.0
GOAL = 1.05


def deployed(
    trace: Trace, gbps: float | None = NVLINK, *, faults: str = "", executors: int = 2, check: bool = False,
    open_s: float = 0.0, **settings: Any,
) -> Deployment:  # fmt: skip
    """Of an 8B model on H200, before it runs."""
    link = None if gbps is None else LinkSpeed(bytes_per_s=gbps * 1e9 / 8, latency_s=5e-5, open_s=open_s)
    return Deployment(
        trace, H200, Settings(executors=executors, **settings), num_executors=executors, link=link, check=check,
        faults=parse_faults(faults),
    )  # fmt: skip


def run(trace: Trace, gbps: float | None = NVLINK, **options: Any) -> Deployment:
    """The same, when it has run."""
    deployment = deployed(trace, gbps, **options)
    deployment.run()
    clients, core = deployment.clients, deployment.simulation.core
    assert (clients.num_failed, clients.num_unserved) == (0, 0)
    assert core.is_idle
    assert not len(core.planner.pulls)
    return deployment


def shared_prefixes(seed: int, rate: float) -> Trace:
    """Prompts behind one of twelve prefixes of 1024 to 8192 tokens, so many a second."""
    rng = np.random.default_rng(seed)
    prefixes, groups = rng.integers(1024, 8192, 12), rng.integers(0, 12, 150)
    prompts, outputs = prefixes[groups] + rng.integers(32, 600, 150), rng.integers(16, 128, 150)
    arrivals = np.cumsum(rng.exponential(1 / rate, 150))
    return make_trace(prompts, outputs, arrivals, prefix_groups=groups, prefix_tokens=prefixes[groups])


# -- right or wrong ----------------------------------------------------------------------------------------------------
def total_ttft_s(trace: Trace, gbps: float, open_s: float = 0.0) -> float:
    """All times to first tokens."""
    ttft = run(trace, gbps, open_s=open_s).clients.ttft
    return ttft.mean * ttft.count


@cache
def without_pulls_s(seed: int, rate: float) -> float:
    """The same without pulls, over whatever link."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "saves", lambda *_: 0)
        patch.setattr(Link, "room", lambda *_: 0)
        patch.setattr(Link, "is_unknown", False)
        return total_ttft_s(shared_prefixes(seed, rate), NVLINK)


def with_all_pulls_s(trace: Trace, gbps: float) -> float:
    """The same with all that are possible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "is_unknown", False)
        patch.setattr(Link, "saves", lambda _, num_blocks, num_tokens, ahead: num_tokens)
        patch.setattr(Link, "room", lambda _, num_blocks, saved: num_blocks)
        return total_ttft_s(trace, gbps)


@pytest.mark.parametrize(("gbps", "rate"), [(1.0, 4.0), (5.0, 4.0), (10.0, 4.0), (NVLINK, 4.0), (10.0, 24.0)])
def test_the_scheduler_pulls_or_computes_whichever_is_better(gbps: float, rate: float) -> None:
    """Within 5%, though at first it does not know how fast the link is."""
    trace = shared_prefixes(0, rate)
    assert total_ttft_s(trace, gbps) <= GOAL * min(without_pulls_s(0, rate), with_all_pulls_s(trace, gbps))


def test_a_slow_link_costs_a_probe() -> None:
    """4 MiB each time that it is tried. Nothing waits for more."""
    report = make_report(run(shared_prefixes(1, 4.0), 1.0))
    assert 0 < report["moves"]["pulled_blocks"] <= 2 * 4
    assert report["moves"]["waited_s"] < 0.2


# -- what happens ------------------------------------------------------------------------------------------------------
def test_a_prefix_is_pulled() -> None:
    """The second prompt finds the first executor busy; its prefix comes over the link in no time."""
    trace = make_trace([8192, 8208], [200, 4], [0.0, 1.0], prefix_groups=0, prefix_tokens=8192)
    settings = {"max_num_seqs": 1, "check": True, "num_gpu_blocks_override": 2000}
    pulled, computed = run(trace, **settings), run(trace, None, **settings)
    assert make_report(pulled)["moves"] == {
        "pulled_blocks": 2 + 510, "pulled_tokens": 8192 - 32, "failed_blocks": 0, "moved_sequences": 0,
        "waited_s": pytest.approx(0.0085, abs=0.005),
    }  # fmt: skip
    assert computed.clients.ttft.percentile(0.0) > 0.18
    assert pulled.clients.ttft.percentile(0.0) < 0.03
    assert "8160 tokens" in table(make_report(pulled))
    assert "pulled" not in table(make_report(computed))


def test_without_prefix_caching_nothing_moves() -> None:
    trace = make_trace([8192, 8208], [200, 4], [0.0, 1.0], prefix_groups=0, prefix_tokens=8192)
    report = make_report(run(trace, max_num_seqs=1, enable_prefix_caching=False))
    assert not any(report["moves"].values())


def test_a_drain_moves_sequences() -> None:
    """They pause for as long as their blocks take; the executor stays until these are there, and then ends."""
    trace = make_trace([512] * 16, [400] * 16, [number / 20 for number in range(16)])
    gaps = {}
    for gbps in (None, 1.0, NVLINK):
        deployment = run(trace, gbps, faults="drain executor-0 at 1.5")
        report = make_report(deployment)
        gaps[gbps] = report["itl_ms"]["max"]
        ((name, member),) = deployment.simulation.past
        assert (name, report["requests"]["done"]) == ("executor-0", 16)
        assert report["moves"]["moved_sequences"] == (0 if gbps is None else 8)
        assert member.killed_s < 1.7
    assert gaps[NVLINK] < 60 < gaps[None]


def test_a_lender_dies_under_a_pull() -> None:
    """What was on its way is computed."""
    trace = make_trace([8192] * 8, [300] * 8)
    faults = "drain executor-0 at 1.5; kill executor-0 at 1.53"
    report = make_report(run(trace, 100.0, faults=faults, check=True, num_gpu_blocks_override=6000))
    assert report["moves"]["failed_blocks"] > 0
    assert report["requests"]["done"] == 8


@pytest.mark.parametrize("faults", ["", "kill executor-1 at 9", "drain executor-0 at 12; add 1 at 13"])
def test_executors_share_their_host_tiers(faults: str) -> None:
    """24 prefixes of 1024 tokens, of which a device holds six, and a host the double of all."""
    rng = np.random.default_rng(0)
    groups, arrivals = rng.integers(0, 24, 120), np.cumsum(rng.exponential(0.25, 120))
    trace = make_trace([1028] * 120, [16] * 120, arrivals, prefix_groups=groups, prefix_tokens=1024)
    deployment = run(trace, faults=faults, check=True, num_gpu_blocks_override=400, swap_space=2.0)
    replicas = deployment.simulation.core.replicas.values()
    assert faults or sum(replica.moves.num_pulled_hosts for replica in replicas) > 0
    assert all(bool(replica.kv_host) for replica in replicas)
    assert deployment.clients.output_tokens == 120 * 16


def test_both_ends_die_and_others_come() -> None:
    trace = shared_prefixes(2, 40.0)
    faults = "kill executor-1 at 1.01; add 1 at 1.5; drain executor-0 at 2; kill executor-2 at 2.2; add 1 at 2.5"
    deployment = run(trace, 50.0, faults=faults, executors=3)
    assert deployment.clients.output_tokens == int(trace.output_tokens.sum())
    assert len(deployment.simulation.past) == 3


def test_roles_keep_prompts_away_from_streams() -> None:
    """One executor computes prompts, the other decodes: its streams pause for their own move alone."""
    trace = make_trace([4096] * 24, [128] * 24, clients=8)
    both, split = (make_report(run(trace, roles=roles)) for roles in (None, "prefill=1,decode=1"))
    assert split["moves"]["moved_sequences"] == 24
    assert split["moves"]["pulled_tokens"] >= 24 * (4096 - 64)
    assert split["itl_ms"]["max"] < 40 < 80 < both["itl_ms"]["p99"]
    assert split["executors"][0]["steps"] < split["executors"][1]["steps"] / 4


def test_who_is_handed_over_does_not_wait_behind_prompts() -> None:
    """With a target decode replicas have prompts of their own, and as many as they may. Streams that come from the
    others need a slot there, no place in that line. (One waited for 0.58 s at the start of such a run.)"""
    trace = make_trace([4096] * 48, [64] * 48, clients=32)
    report = make_report(run(trace, roles="prefill=1,decode=1", itl_target_ms=15.0))
    assert report["moves"]["moved_sequences"] > 20
    assert report["itl_ms"]["max"] < 120


def test_a_step_of_a_decode_replica_is_short() -> None:
    """Many short prompts at once are computed in several steps there: streams of others wait for each. So are those
    that it computes before it has streams."""
    trace = make_trace([100] + [1000] * 16, [400] + [20] * 16, [0.0] + [1.0] * 16)
    both, split = (make_report(run(trace, roles=roles)) for roles in (None, "prefill=1,decode=1"))
    assert split["itl_ms"]["max"] < 40 < 80 < both["itl_ms"]["max"]


def test_the_same_run_moves_the_same() -> None:
    reports = [make_report(run(shared_prefixes(3, 24.0), 100.0)) for _ in range(2)]
    assert reports[0] == reports[1]


# -- the command line --------------------------------------------------------------------------------------------------
SMALL = ["simulate", "--workload", "long4k", "--requests", "8", "--executors", "2"]


def test_roles_and_links_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--roles", "prefill=1,decode=1", "--link-gbps", "2000"]) == 0
    assert "sequences moved              8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--roles", "prefill=1,decode=1"], "--link-gbps"),
        (["--roles", "prefill=2,decode=1", "--link-gbps", "10"], "these are 3 executors, but --executors is 2"),
        (["--link-gbps", "0"], "--link-gbps must be above 0"),
        (["--link-gbps", "1", "--link-latency-ms", "-1"], "--link-latency-ms"),
    ],
    ids=str,
)
def test_links_that_make_no_sense(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *arguments]) == 2
    assert reason in capsys.readouterr().err
