"""The commands ``pagebus simulate`` and ``pagebus record``: their arguments, and what they do."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.command_line import Commands, number, output_file, output_folder
from pagebus.actors.settings.sources import add_arguments, add_bus_arguments, load_settings
from pagebus.actors.telemetry.last_words import say

if TYPE_CHECKING:
    from pagebus.actors.simulator.deployment import Deployment
    from pagebus.actors.simulator.links import LinkSpeed

SIMULATED = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_gpu_blocks_override",
    "swap_space",
    "preemption_mode",
    "enable_prefix_caching",
    "pipeline_depth",
    "max_num_queued_requests",
    "scheduling_policy",
    "priority_aging_s",
    "itl_target_ms",
    "ttft_target_ms",
    "lease_ttl_s",
    "spec_method",
    "spec_tokens",
    "roles",
    "drain_timeout_s",
)
"""The settings that make a difference to the core or to a modelled executor."""


def add_simulator(commands: Commands) -> None:
    """Add ``simulate`` and ``record`` to the command line."""
    simulate = commands.add(
        "simulate",
        run_simulator,
        help="run the scheduler against modelled executors, faster than real time",
        description="Run the scheduler's core against executors whose step times come from a measured profile, on a "
        "virtual clock, and report latencies and throughput.",
    )
    _add_simulate(simulate)
    add_arguments(simulate, model=False, only=SIMULATED)
    record = commands.add(
        "record",
        run_simulator,
        help="record the traffic and the steps of a running deployment, for simulate and for fitting profiles",
        description="Read the streams of a running deployment beside its actors, without any effect on it, and write "
        "a trace: arrivals with lengths and shared blocks, and a log of all steps. Ends with Ctrl-C.",
    )
    record.add_argument(
        "--out", required=True, metavar="FILE", help="output file of the trace (JSON Lines; ending in .gz, compressed)"
    )
    record.add_argument("--seconds", type=number, metavar="S", help="duration of the recording")
    add_bus_arguments(record)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run", "what is simulated")
    what = run.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", metavar="FILE", help="requests from a trace file (JSON Lines)")
    what.add_argument("--workload", metavar="NAME", help="requests of a named workload; 'list' shows them")
    run.add_argument("--requests", type=int, metavar="N", help="how many (default: the workload's)")
    run.add_argument("--rate", type=number, metavar="R", help="Poisson arrivals per second; 0: all at once")
    run.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help="concurrent clients, each sending its next request after the last answer",
    )
    run.add_argument("--seed", dest="workload_seed", type=int, default=0, help="of the workload (default: 0)")
    run.add_argument("--executors", type=int, default=1, metavar="N", help="(default: 1)")
    run.add_argument("--profile", default="h200-llama8b", metavar="NAME|FILE", help="(default: h200-llama8b)")
    run.add_argument(
        "--faults", default="", metavar="SPEC", help="'kill executor-3 at 12.5; drain executor-0 at 14; add 2 at 20'"
    )
    run.add_argument(
        "--draft-acceptance",
        type=number,
        default=0.6,
        metavar="P",
        help="with --spec-method: the chance of a draft to be right, if those before it are (default: 0.6)",
    )
    _add_links(run)
    run.add_argument("--check", action="store_true", help="check every invariant of the scheduler after every step")
    out = parser.add_argument_group("report")
    out.add_argument("--slo-ttft-ms", type=number, metavar="MS", help="good requests: time to first token at most this")
    out.add_argument("--slo-itl-ms", type=number, metavar="MS", help="good requests: mean time per token at most this")
    out.add_argument("--json", type=output_file, metavar="FILE", help="write the report there too")
    out.add_argument("--plot", type=output_folder, metavar="FOLDER", help="draw pictures (SVG) into this folder")
    out.add_argument(
        "--record", type=output_file, metavar="FILE", help="write requests and steps as 'record' does (JSON Lines)"
    )


def _add_links(run: argparse._ArgumentGroup) -> None:
    run.add_argument(
        "--link-gbps",
        type=number,
        metavar="X",
        help="gigabits per second of each executor's link to the others, in either direction; NVLink: 2000 (default: "
        "executors pull no blocks from each other)",
    )
    run.add_argument(
        "--link-latency-ms",
        type=number,
        default=0.05,
        metavar="MS",
        help="of each pull, before its bytes (default: 0.05)",
    )
    run.add_argument(
        "--link-open-ms", type=number, default=0.0, metavar="MS", help="of the first pull between two (default: 0)"
    )


def run_simulator(arguments: argparse.Namespace) -> int:
    """Run ``simulate`` or ``record``.

    Raises:
        SettingsError: something was asked for that cannot be.
    """
    settings = load_settings(arguments)
    return _record(arguments, settings) if arguments.command == "record" else _simulate(arguments, settings)


def _record(arguments: argparse.Namespace, settings: Settings) -> int:
    from pagebus.actors.simulator.recording.record import record
    from pagebus.bus.contract import BusError

    try:
        return asyncio.run(record(settings, Path(arguments.out), arguments.seconds))
    except BusError as error:
        say(error)
        return 1
    except OSError as error:
        raise SettingsError(f"--out: {error}") from error


def _simulate(arguments: argparse.Namespace, settings: Settings) -> int:
    from pagebus.actors.simulator.drawing.plots import draw
    from pagebus.actors.simulator.report import make_report, table
    from pagebus.actors.simulator.watch import Recorder
    from pagebus.actors.simulator.workloads import WORKLOADS

    if arguments.workload == "list":
        print("\n".join(f"{name:16} {workload.text}" for name, workload in WORKLOADS.items()))
        return 0
    deployment = _make_deployment(arguments, settings)
    recorder = Recorder(deployment) if arguments.plot else None
    if recorder is not None:
        deployment.watch(recorder)
    memory = _watch_memory(deployment)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    with _recorded(deployment, arguments.record):
        deployment.run()
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    report = make_report(deployment)
    print(table(report))
    _say_speed(report, took_s, cpu_s, [*memory, _rss_mib()])
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if recorder is not None:
        draw(recorder.run(), arguments.plot)
    return 0 if report["requests"]["unserved"] == 0 else 1


def _make_deployment(arguments: argparse.Namespace, settings: Settings) -> Deployment:
    """What is simulated.

    Raises:
        SettingsError: there cannot be such.
    """
    from pagebus.actors.simulator.clients import Slo
    from pagebus.actors.simulator.deployment import Deployment
    from pagebus.actors.simulator.faults import parse_faults
    from pagebus.actors.simulator.profile import load_profile

    if not 0 <= arguments.draft_acceptance <= 1:
        raise SettingsError("--draft-acceptance must be from 0 to 1")
    slo = Slo(_limit_s(arguments.slo_ttft_ms), _limit_s(arguments.slo_itl_ms))
    try:
        return Deployment(
            _trace(arguments),
            load_profile(arguments.profile),
            settings,
            num_executors=settings.executors,
            faults=parse_faults(arguments.faults),
            slo=slo,
            check=arguments.check,
            acceptance=arguments.draft_acceptance,
            link=_link(arguments, settings),
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error


@contextmanager
def _recorded(deployment: Deployment, path: str | None) -> Iterator[None]:
    """Record requests and steps of the block, if requested.

    Raises:
        SettingsError: the file cannot be written.
    """
    from pagebus.actors.simulator.recording.trace import open_text
    from pagebus.actors.simulator.watch import StepLog

    if path is None:
        yield
        return
    try:
        file = open_text(path, "w")
    except OSError as error:
        raise SettingsError(f"--record: {error}") from error
    with file:
        log = StepLog(deployment, file)
        deployment.watch(log)
        yield
        log.finish()


def _watch_memory(deployment: Deployment) -> list[float]:
    """The memory in use now; one more value is added after every tenth of the requests but the last."""
    memory, trace = [_rss_mib()], deployment.clients.trace
    if len(trace) >= 10 and not trace.clients:
        for tenth in range(1, 10):
            at_s = float(trace.arrival_s[len(trace) * tenth // 10])
            deployment.simulation.at(at_s, lambda _: memory.append(_rss_mib()))
    return memory


def _say_speed(report: dict[str, Any], took_s: float, cpu_s: float, memory_mib: list[float]) -> None:
    done, steps = report["requests"]["done"], report["steps"]
    print(
        f"\nsimulated {report['duration_s']:.1f} s in {took_s:.1f} s ({cpu_s:.1f} s of CPU): "
        f"{done / took_s:.0f} requests/s, {cpu_s / max(steps, 1) * 1e6:.0f} us a step\n"
        f"memory at the start, after each tenth of the requests and at the end: "
        f"{', '.join(f'{each:.0f}' for each in memory_mib)} MiB",
        file=sys.stderr,
    )


def _trace(arguments: argparse.Namespace) -> Any:
    from pagebus.actors.simulator.recording.trace import read_trace
    from pagebus.actors.simulator.workloads import WORKLOADS, make_workload

    if arguments.trace:
        try:
            return read_trace(arguments.trace)
        except OSError as error:
            raise SettingsError(f"--trace: {error}") from error
    if arguments.workload not in WORKLOADS:
        raise SettingsError(f"--workload: no {arguments.workload!r}; there are {', '.join(WORKLOADS)}")
    if arguments.workload_seed < 0:
        raise SettingsError(f"--seed {arguments.workload_seed}: must be at least 0")
    for name in ("requests", "rate", "clients"):
        value = getattr(arguments, name)
        if value is not None and value < (name == "requests"):
            raise SettingsError(f"--{name} {value} is too small")
    return make_workload(
        arguments.workload,
        seed=arguments.workload_seed,
        requests=arguments.requests,
        rate=arguments.rate,
        clients=arguments.clients,
    )


def _link(arguments: argparse.Namespace, settings: Settings) -> LinkSpeed | None:
    """What executors pull over.

    Raises:
        SettingsError: it cannot be.
    """
    from pagebus.actors.simulator.links import LinkSpeed

    if arguments.link_gbps is None:
        if settings.roles is not None:
            raise SettingsError("--roles: executors have to pull blocks, give their --link-gbps")
        return None
    if not arguments.link_gbps > 0 or arguments.link_latency_ms < 0 or arguments.link_open_ms < 0:
        raise SettingsError("--link-gbps must be above 0, --link-latency-ms and --link-open-ms at least 0")
    return LinkSpeed(
        bytes_per_s=arguments.link_gbps * 1e9 / 8,
        latency_s=arguments.link_latency_ms / 1e3,
        open_s=arguments.link_open_ms / 1e3,
    )


def _limit_s(limit_ms: float | None) -> float:
    return float("inf") if limit_ms is None else limit_ms / 1e3


def _rss_mib() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
