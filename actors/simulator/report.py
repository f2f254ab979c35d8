"""The report of a simulated run, as values and as a table."""

from __future__ import annotations

from typing import Any

from pagebus.actors.simulator.clients import Clients
from pagebus.actors.simulator.deployment import Deployment
from pagebus.actors.simulator.histogram import Histogram
from pagebus.actors.simulator.simulation import (
    ACCEPTED,
    DEPARTURES,
    DRAFTED,
    FAILED_PULLS,
    HITS,
    PULLED,
    PULLED_TOKENS,
    QUERIES,
    RECOMPUTES,
    SWAPS,
    Simulation,
)


def make_report(deployment: Deployment) -> dict[str, Any]:
    """Everything that was measured; times in the unit of the name. The same run gives the same report."""
    clients, simulation = deployment.clients, deployment.simulation
    duration_s = max(clients.last_token_s - clients.first_arrival_s, 0.0) if clients.num_sent else 0.0
    per_s = 1.0 / duration_s if duration_s else 0.0
    return {
        "requests": {
            "sent": clients.num_sent,
            "done": clients.num_done,
            "failed": clients.num_failed,
            "unserved": clients.num_unserved,
        },
        "duration_s": _round(duration_s),
        "ttft_ms": _percentiles(clients.ttft),
        "itl_ms": _percentiles(clients.itl),
        "tpot_ms": _percentiles(clients.tpot),
        "e2e_ms": _percentiles(clients.e2e),
        "throughput": {
            "output_tokens_per_s": _round(clients.output_tokens * per_s),
            "total_tokens_per_s": _round((clients.output_tokens + clients.prompt_tokens) * per_s),
            "requests_per_s": _round(clients.num_done * per_s),
            "good_requests_per_s": _round(clients.num_good * per_s),
        },
        **_scheduling(simulation, clients),
    }


def _scheduling(simulation: Simulation, clients: Clients) -> dict[str, Any]:
    """What the core and the executors have counted."""
    totals = simulation.totals()
    end_s = clients.last_token_s
    executors = []
    for name, member in sorted([*simulation.past, *simulation.members.items()], key=lambda each: _natural(each[0])):
        alive_s = max(min(member.killed_s, end_s) - max(member.joined_s, min(clients.first_arrival_s, end_s)), 0.0)
        busy = min(member.busy_s / alive_s, 1.0) if alive_s else 0.0
        executors.append({"name": name, "steps": member.steps, "busy_share": _round(busy)})
    queries = totals[QUERIES]
    return {
        "prefix_hit_rate": _round(totals[HITS] / queries) if queries else 0.0,
        "preemptions": {
            "swap": totals[SWAPS],
            "recompute": totals[RECOMPUTES],
            "move": totals[DEPARTURES],
        },
        "drafts": {"drafted": totals[DRAFTED], "accepted": totals[ACCEPTED]},
        "swapped_blocks": {"out": simulation.swapped_out, "in": simulation.swapped_in},
        "moves": {
            "pulled_blocks": totals[PULLED],
            "pulled_tokens": totals[PULLED_TOKENS],
            "failed_blocks": totals[FAILED_PULLS],
            "moved_sequences": simulation.num_moved,
            "waited_s": _round(simulation.pull_wait_s),
        },
        "steps": simulation.num_steps,
        "scheduler_busy_share": _round(simulation.busy_s / end_s) if end_s else 0.0,
        "executors": executors,
    }


def _natural(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition("-")
    return head, int(tail) if tail.isdigit() else 0


def _percentiles(values: Histogram) -> dict[str, float]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {"mean": _round(values.mean * 1e3)} | {
        name: _round(values.percentile(share) * 1e3) for name, share in shares.items()
    }


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    requests = report["requests"]
    lines = [
        f"requests   {requests['sent']} sent, {requests['done']} done, {requests['failed']} failed, "
        f"{requests['unserved']} unserved, in {report['duration_s']:.2f} s",
        "",
        *_latency_lines(report),
        "",
        *_rate_lines(report),
        *_optional_lines(report),
    ]
    executors = report["executors"]
    if 1 < len(executors) <= 16:
        lines += [
            "",
            *(f"{each['name']:18}{each['steps']:12d} steps  {each['busy_share']:7.1%} busy" for each in executors),
        ]
    return "\n".join(lines)


def _latency_lines(report: dict[str, Any]) -> list[str]:
    columns = ("mean", "p50", "p90", "p99", "max")
    names = {
        "ttft_ms": "time to first token",
        "itl_ms": "between tokens",
        "tpot_ms": "per token, by request",
        "e2e_ms": "whole request",
    }
    head = f"{'ms':28}" + "".join(f"{each:>10}" for each in columns)
    rows = (f"{text:28}" + "".join(f"{report[key][each]:10.2f}" for each in columns) for key, text in names.items())
    return [head, *rows]


def _rate_lines(report: dict[str, Any]) -> list[str]:
    rates, preemptions, swapped = report["throughput"], report["preemptions"], report["swapped_blocks"]
    shares = [each["busy_share"] for each in report["executors"]]
    moved = f", {preemptions['move']} to others" if preemptions["move"] else ""
    return [
        f"output tokens/s   {rates['output_tokens_per_s']:12.1f}      "
        f"all tokens/s  {rates['total_tokens_per_s']:12.1f}",
        f"requests/s        {rates['requests_per_s']:12.2f}      good ones/s   {rates['good_requests_per_s']:12.2f}",
        f"prefix hit rate   {report['prefix_hit_rate']:12.1%}      preemptions   "
        f"{preemptions['swap']} by swap, {preemptions['recompute']} by recompute{moved}",
        f"blocks swapped    {swapped['out']:12d} out, {swapped['in']} in",
        f"steps             {report['steps']:12d}      busy          scheduler {report['scheduler_busy_share']:.1%}, "
        f"executors {min(shares, default=0):.1%} to {max(shares, default=0):.1%}",
    ]


def _optional_lines(report: dict[str, Any]) -> list[str]:
    """Drafts and moves, of runs that had any."""
    drafts, moves, lines = report["drafts"], report["moves"], []
    if drafts["drafted"]:
        wasted = drafts["drafted"] - drafts["accepted"]
        lines.append(f"drafts            {drafts['drafted']:12d}      {drafts['accepted']} accepted, {wasted} wasted")
    if any(moves.values()):
        lines += [
            f"blocks pulled     {moves['pulled_blocks']:12d}      {moves['pulled_tokens']} tokens, "
            f"{moves['failed_blocks']} blocks failed",
            f"sequences moved   {moves['moved_sequences']:12d}      waited for pulls {moves['waited_s']:.2f} s in all",
        ]
    return lines
