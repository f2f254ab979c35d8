"""What automatic roles and preemption to a neighbour are worth, by the simulator: an 8B model on H200s with NVLink.

    python -m tests.actors.simulator.bench_roles [2] [4] [uneven] [handed] [ahead]

``2``, ``4``: so many executors under a load that shifts from long prompts beside chats to chats, and then to more long
prompts than prefill executors compute. Prints for each choice of roles, and each phase without its first eight seconds:
output tokens and requests a second, pauses, and times to first tokens. ``uneven``: long sequences that grow on one of
two executors. ``handed``: how long sequences pause that are handed over from a prefill executor. ``ahead``: the same
behind prompts that take several steps, over links of several rates, without and with pulls beside the prompts.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np

from pagebus.actors.scheduler.core import planner
from pagebus.actors.scheduler.fleet.neighbours import Neighbours
from pagebus.actors.simulator.histogram import Histogram
from pagebus.actors.simulator.recording.trace import Trace, make_trace
from pagebus.actors.simulator.report import make_report
from pagebus.actors.simulator.simulation import Observer
from pagebus.actors.simulator.workloads import chat_lengths, make_workload
from pagebus.bus.messages import StepResult
from tests.actors.simulator.test_moves import NVLINK, deployed

PHASE_S, SETTLES_S = 20.0, 8.0
PHASES = {2: ((6.0, 10.0), (0.1, 25.0), (13.0, 5.0)), 4: ((12.0, 20.0), (0.2, 50.0), (26.0, 10.0))}
"""Long prompts and chats a second."""
LONG_TOKENS, LONG_OUTPUT = 4096, 64
CHOICES = {
    2: (None, "prefill=1,decode=1", "auto"),
    4: (None, "prefill=1,decode=3", "prefill=2,decode=2", "auto"),
}
NOTED_S = 0.03


def shifting(executors: int, seed: int = 0) -> Trace:
    """The three phases."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[float, int, int]] = []
    for number, rates in enumerate(PHASES[executors]):
        for is_chat, rate in enumerate(rates):
            count = rng.poisson(rate * PHASE_S)
            arrivals = (number + rng.random(count)) * PHASE_S
            prompts = chat_lengths(rng, count) if is_chat else np.full(count, LONG_TOKENS)
            outputs = chat_lengths(rng, count) if is_chat else np.full(count, LONG_OUTPUT)
            rows += zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    arrivals, prompts, outputs = zip(*sorted(rows), strict=True)
    return make_trace(prompts, outputs, arrivals)


def shift(executors: int, roles: str | None) -> None:
    """One choice of roles."""
    deployment = deployed(shifting(executors), NVLINK, executors=executors, roles=roles)
    clients, parts = deployment.clients, [(0.0, 0, 0, Histogram(), Histogram())]

    def cut(at_s: float) -> None:
        parts.append((at_s, clients.output_tokens, clients.num_done, clients.itl, clients.ttft))
        clients.itl, clients.ttft = Histogram(), Histogram()

    for number in range(len(PHASES[executors])):
        deployment.simulation.at(number * PHASE_S + SETTLES_S, cut)
        deployment.simulation.at((number + 1) * PHASE_S, cut)
    deployment.run()
    for number, (before, after) in enumerate(list(pairwise(parts))[1::2], 1):
        (from_s, tokens, done, *_), (at_s, more_tokens, more_done, itl, ttft) = before, after
        pauses = "".join(f"{itl.percentile(share) * 1e3:8.1f}" for share in (0.5, 0.99, 0.999))
        print(
            f"{executors:9} {roles or '-':20} {number:5} {(more_tokens - tokens) / (at_s - from_s):9.0f} "
            f"{(more_done - done) / (at_s - from_s):10.2f} {pauses} {ttft.percentile(0.5) * 1e3:9.0f} "
            f"{ttft.percentile(0.99) * 1e3:7.0f}",
            flush=True,
        )
    print(
        f"{'':9} {roles or '-':20} all done after {clients.last_token_s:.2f} s, {deployment.simulation.num_moved} moved"
    )


class Pauses(Observer):
    """Those of more than ``NOTED_S``; and all ``handed`` over, in which a sequence has changed its executor."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.handed: list[float] = []
        self._last: dict[int, tuple[float, str]] = {}

    def result(self, at_s: float, replica: str, result: StepResult) -> None:
        for number in result.sequence_ids.tolist():
            before_s, before = self._last.get(number, (result.done_s, replica))
            pause_s = result.done_s - before_s
            self.seconds += [pause_s] if pause_s > NOTED_S else []
            self.handed += [pause_s] if before != replica else []
            self._last[number] = result.done_s, replica


def handed(itl_target_ms: float | None) -> None:
    """``long4k`` with a prefill and a decode executor."""
    deployment = deployed(make_workload("long4k"), NVLINK, roles="prefill=1,decode=1", itl_target_ms=itl_target_ms)
    pauses = Pauses()
    deployment.watch(pauses)
    deployment.run()
    report = make_report(deployment)
    lengths = "".join(f"{each * 1e3:8.1f}" for each in np.percentile(pauses.handed, (50, 90, 99, 100)))
    print(
        f"{itl_target_ms or '-':>6} {report['throughput']['requests_per_s']:10.2f} {report['ttft_ms']['p50']:9.0f} "
        f"{report['itl_ms']['p50']:9.1f} {report['itl_ms']['p99']:7.1f} {len(pauses.handed):11} {lengths}",
        flush=True,
    )


def ahead(tokens: int, per_s: float, gbps: float, is_ahead: bool) -> None:
    """40 prompts of so many tokens, with a prefill and a decode executor."""
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / per_s, 40))
    deployment = deployed(make_trace([tokens] * 40, [64] * 40, arrivals), gbps, roles="prefill=1,decode=1")
    sends = planner.send_ahead
    if not is_ahead:
        planner.send_ahead = lambda *_: None  # type: ignore[assignment]
    try:
        pauses = Pauses()
        deployment.watch(pauses)
        deployment.run()
    finally:
        planner.send_ahead = sends
    report = make_report(deployment)
    lengths = "".join(f"{each * 1e3:8.1f}" for each in np.percentile(pauses.handed, (50, 90, 100)))
    print(
        f"{tokens:6} {gbps:6.0f} {'yes' if is_ahead else 'no':>5} {report['ttft_ms']['p50']:9.0f} "
        f"{len(pauses.handed):11} {lengths} {report['moves']['pulled_blocks']:8}",
        flush=True,
    )


def uneven(gbps: float | None, swap_space: float, neighbours: bool) -> None:
    """Prompts of 4000 and 100 tokens come in turns: those of 4000 meet on one executor, as its load is the same."""
    trace = make_trace([4000, 100] * 25, [1500] * 50, np.arange(50) * 0.15)
    takes = Neighbours.takes
    if not neighbours:
        Neighbours.takes = lambda *_: False  # type: ignore[method-assign]
    try:
        deployment = deployed(trace, gbps, swap_space=swap_space, num_gpu_blocks_override=5600)
        pauses = Pauses()
        deployment.watch(pauses)
        deployment.run()
    finally:
        Neighbours.takes = takes  # type: ignore[method-assign]
    report = make_report(deployment)
    kinds, swapped, seconds = report["preemptions"], report["swapped_blocks"], sorted(pauses.seconds)
    print(
        f"{gbps or 0:6.0f} {swap_space:6.0f} {'yes' if neighbours else 'no':>10} {kinds['swap']:6} "
        f"{kinds['recompute']:10} {kinds['move']:6} {report['moves']['pulled_blocks']:8} "
        f"{swapped['out'] + swapped['in']:8}"
        f" {len(seconds):7} {sum(seconds):7.2f} {max(seconds, default=0.0) * 1e3:9.0f}",
        flush=True,
    )


def main(chosen: list[str]) -> None:
    """All, or what is chosen."""
    for executors in (2, 4):
        if str(executors) in chosen or not chosen:
            print(
                f"{'executors':>9} {'roles':20} phase  tokens/s requests/s pause p50      p99   p99.9 first p50     p99"
            )
            for roles in CHOICES[executors]:
                shift(executors, roles)
    if "uneven" in chosen or not chosen:
        print(
            f"{'Gb/s':>6} {'host':>6} {'neighbours':>10} {'swaps':>6} {'recomputes':>10} {'moves':>6} {'pulled':>8} "
            f"{'swapped':>8} {'pauses':>7} {'s':>7} {'longest':>9}"
        )
        for swap_space in (0.0, 8.0):
            for gbps, neighbours in ((None, False), (NVLINK, False), (NVLINK, True), (100.0, False), (100.0, True)):
                uneven(gbps, swap_space, neighbours)
    if "handed" in chosen or not chosen:
        print("target requests/s first p50 pause p50     p99 handed over      p50     p90     p99 longest")
        for target in (None, 15.0):
            handed(target)
    if "ahead" in chosen or not chosen:
        print("tokens   Gb/s ahead first p50 handed over      p50     p90 longest   pulled")
        for tokens, per_s in ((16384, 1.0), (32768, 0.5)):
            for gbps in (NVLINK, 400.0, 200.0, 100.0):
                for is_ahead in (False, True):
                    ahead(tokens, per_s, gbps, is_ahead)


if __name__ == "__main__":
    main(sys.argv[1:])
