"""The command ``pagebus bench`` and its sub-commands: their arguments, and who does the work."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pagebus.actors.settings import SettingsError
from pagebus.actors.settings.command_line import Commands, number, output_file, output_folder, rate
from pagebus.actors.settings.sources import add_arguments, field_types, load_settings

MODEL_HELP = "folder, Hugging Face id, or a shape with random weights, such as llama8b (default: the shipped model)"

POSITIVE = (
    *("scale", "requests", "repeats", "steps", "picture_steps", "batch", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "processes", "timeout_s", "vocab_size", "loras", "lora_rank"),
)
"""Options that must be more than 0."""

CHOSEN = frozenset(
    ("bus", "name", "host", "port", "api_key", "executors", "actor_name", "data_dir", "log_format", "span_dir")
)
"""Settings that the benchmark chooses itself."""


def add_bench(commands: Commands) -> None:
    """Add ``bench`` to the command line."""
    bench = commands.add(
        "bench",
        run_bench,
        help="measure: an engine over the bus, any server over HTTP, a start",
        description="Measure Pagebus, or any server that speaks OpenAI's protocol.",
    )
    benchmarks = Commands(bench, "benchmark")
    _add_engine(benchmarks)
    _add_profile(benchmarks)
    _add_serve(benchmarks)
    _add_start(benchmarks)
    _add_tables(benchmarks)
    _add_shape(benchmarks)


def _add_engine(benchmarks: Commands) -> None:
    engine = benchmarks.add(
        "engine",
        help="run workloads as token ids over the bus of a temporary deployment",
        description="Start a deployment with the settings given, submit workloads as token ids over its bus, and "
        "report throughput, step times, latencies and how busy the GPU is.",
    )
    run = engine.add_argument_group("run", "what is measured")
    run.add_argument(
        "--workloads", nargs="+", metavar="NAME", default=["decode", "mixed256", "chat1000", "prefill"],
        help="decode, mixed256, chat1000, prefill, prefix, swap, longctx (default: the first four)",
    )  # fmt: skip
    run.add_argument(
        "--batches", nargs="+", type=int, metavar="N", default=[1, 8, 32, 64, 128, 256],
        help="batch sizes of the workload decode (default: 1 8 32 64 128 256)",
    )  # fmt: skip
    _add_sizes(run)
    _add_loras(run)
    run.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of which the median counts (default: 3)")
    _add_waiting(run)
    run.add_argument("--json", type=output_file, metavar="FILE", help="write all figures of all runs there")
    _add_settings(engine)


def _add_profile(benchmarks: Commands) -> None:
    profile = benchmarks.add(
        "profile",
        help="some steps of a workload as a Chrome trace: scheduler, bus, executor thread, device",
        description="Start a deployment with the settings given, run a workload on it, and write what scheduler, bus, "
        "executor thread and device did in some of its steps, as a trace for Perfetto.",
    )
    run = profile.add_argument_group("run", "what is measured")
    run.add_argument("--workload", default="mixed256", metavar="NAME", help="as for engine (default: mixed256)")
    run.add_argument("--batch", type=int, default=256, metavar="N", help="of the workload decode (default: 256)")
    _add_sizes(run)
    _add_loras(run)
    run.add_argument(
        "--runs-before",
        type=int,
        default=0,
        metavar="N",
        help="runs of the workload that are not measured (default: 0)",
    )
    run.add_argument("--steps", type=int, default=50, metavar="N", help="steps of the trace (default: 50)")
    run.add_argument("--out", type=output_file, required=True, metavar="FILE", help="where the trace goes (JSON)")
    run.add_argument("--picture", type=output_file, metavar="FILE", help="draw the first of these steps (SVG)")
    run.add_argument("--picture-steps", type=int, default=5, metavar="N", help="steps in the picture (default: 5)")
    _add_settings(profile)


def _add_serve(benchmarks: Commands) -> None:
    serve = benchmarks.add(
        "serve",
        help="load for any server with OpenAI's protocol, over HTTP",
        description="Send the requests of a workload to a server with OpenAI's protocol, streaming, and report what "
        "its clients see. Options have the names of `vllm bench serve` where they mean the same. A key for the server "
        "comes from OPENAI_API_KEY.",
    )
    _add_server(serve)
    _add_load(serve)
    _add_report(serve)


def _add_server(serve: argparse.ArgumentParser) -> None:
    server = serve.add_argument_group("server")
    text = "without /v1 (default: port 8000 here)"
    server.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help=text)
    server.add_argument("--backend", choices=("openai", "openai-chat"), default="openai", help="completions or chats")
    server.add_argument("--endpoint", metavar="PATH", help="(default: /v1/completions or /v1/chat/completions)")
    server.add_argument("--model", metavar="NAME", help="(default: the first that the server lists)")
    server.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME",
        help="adapters that requests name in place of the model",
    )
    server.add_argument("--lora-assignment", choices=("random", "round-robin"), default="random", help="how they do")
    server.add_argument("--header", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="sent each time")
    server.add_argument("--extra-body", default="{}", metavar="JSON", help="fields added to every request")


def _add_load(serve: argparse.ArgumentParser) -> None:
    load = serve.add_argument_group("load")
    load.add_argument("--workload", default="chat", metavar="NAME", help="as for simulate (default: chat)")
    load.add_argument("--num-prompts", type=int, metavar="N", help="requests (default: the workload's)")
    load.add_argument("--scale", type=number, default=1.0, metavar="X", help="all lengths times this (default: 1)")
    load.add_argument("--request-rate", type=rate, metavar="R", help="per second; inf: all at once")
    load.add_argument("--burstiness", type=number, default=1.0, metavar="B", help="1: Poisson; more: more even")
    load.add_argument("--max-concurrency", type=int, metavar="N", help="requests at a time")
    load.add_argument("--prompts", choices=("ids", "text"), default="ids", help="prompts as token ids or as words")
    load.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="ids are below this (default: 4096)")
    load.add_argument("--temperature", type=number, default=0.0, metavar="T", help="(default: 0)")
    load.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="(default: on)")
    load.add_argument("--continuous-usage-stats", action="store_true", help="count tokens by usage in every event")
    load.add_argument("--num-warmups", type=int, default=4, metavar="N", help="requests not counted (default: 4)")
    _add_waiting(load)
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, prompts and arrivals (default: 0)")
    load.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes that share the load (default: 1)"
    )
    load.add_argument("--timeout-s", type=number, default=3600.0, metavar="S", help="of one request (default: 3600)")


def _add_report(serve: argparse.ArgumentParser) -> None:
    report = serve.add_argument_group("report")
    report.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of which the median counts")
    report.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="limits: ttft:300 itl:50 ...")
    report.add_argument("--metric-percentiles", default="50,90,99", metavar="P", help="(default: 50,90,99)")
    report.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    report.add_argument("--json", type=output_file, metavar="FILE", help="write all figures of all runs there")


def _add_start(benchmarks: Commands) -> None:
    start = benchmarks.add(
        "start",
        help="measure the phases of a start",
        description="Start a deployment with the settings given, several times, and report how long each phase took, "
        "up to the first token over HTTP.",
    )
    run = start.add_argument_group("run", "what is measured")
    run.add_argument("--repeats", type=int, default=3, metavar="N", help="starts (default: 3)")
    run.add_argument("--json", type=output_file, metavar="FILE", help="write all times of all starts there")
    _add_settings(start)


def _add_tables(benchmarks: Commands) -> None:
    tables = benchmarks.add(
        "tables",
        help="Markdown tables from the JSON of other benchmarks, beside vLLM's figures and the goals",
        description="Print the tables of docs/performance.md that these files have figures for.",
    )
    tables.add_argument("files", nargs="+", metavar="FILE", help="what --json of engine, serve and start wrote")
    tables.add_argument("--into", metavar="FILE", help="put them there, between two marks, instead of printing them")


def _add_shape(benchmarks: Commands) -> None:
    shape = benchmarks.add(
        "shape",
        help="write the folder of a named shape, to be served with random weights",
        description="Write a model's configuration and a tokenizer for it, to be served with --load-format dummy.",
    )
    shape.add_argument("name", metavar="NAME", help="llama8b, qwen06b and so on; for any other word, all are listed")
    shape.add_argument("folder", type=output_folder, metavar="FOLDER", help="parent of the new folder")


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--requests", type=int, metavar="N", help="requests of a workload (default: its own number)")
    group.add_argument("--scale", type=number, default=1.0, metavar="X", help="all lengths times this (default: 1)")
    group.add_argument("--workload-seed", type=int, default=0, metavar="N", help="of prompts (default: 0)")


def _add_loras(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--loras", type=int, metavar="N",
        help="random adapters that requests take turns with, all in one step unless --max-loras says less",
    )  # fmt: skip
    group.add_argument("--lora-rank", type=int, default=16, metavar="R", help="rank of these adapters (default: 16)")


def _add_waiting(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--wait-for-graphs", action=argparse.BooleanOptionalAction, default=True,
        help="begin when all CUDA graphs are captured (default: on; executors that report none are not waited for)",
    )  # fmt: skip


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Everything that ``serve`` understands, with the model as an option."""
    parser.add_argument("--model", default=argparse.SUPPRESS, metavar="MODEL", help=MODEL_HELP)
    add_arguments(parser, model=False, only=[name for name in field_types() if name not in CHOSEN])


def run_bench(arguments: argparse.Namespace) -> int:
    """Run one benchmark; returns the exit code.

    Raises:
        SettingsError: something was asked for that cannot be.
    """
    from pagebus.actors.bench.driver.deployment import BenchError
    from pagebus.bus.contract import BusError

    try:
        return _run(arguments)
    except (BenchError, BusError) as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    for name in POSITIVE:
        value = getattr(arguments, name, None)
        if value is not None and value <= 0:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: must be more than 0")
    match arguments.benchmark:
        case "engine":
            from pagebus.actors.bench.engine import bench_engine

            return bench_engine(arguments, load_settings(arguments))
        case "serve":
            from pagebus.actors.bench.serve import bench_serve

            return bench_serve(arguments)
        case "start":
            from pagebus.actors.bench.start import bench_start

            return bench_start(arguments, load_settings(arguments))
        case "tables":
            from pagebus.actors.bench.tables import bench_tables

            return bench_tables(arguments.files, arguments.into)
        case "shape":
            return _write_shape(arguments.name, arguments.folder)
        case "profile":
            from pagebus.actors.bench.engine import chosen, workloads_for
            from pagebus.actors.bench.profile import bench_profile

            settings = load_settings(arguments)
            workloads = chosen(workloads_for(arguments, settings, [arguments.batch]), [arguments.workload])
            return bench_profile(arguments, settings, workloads[arguments.workload])
        case _:
            raise AssertionError(arguments.benchmark)


def _write_shape(name: str, parent: Path) -> int:
    from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder

    if name not in SHAPES:
        raise SettingsError(f"no shape {name!r}: there are {', '.join(SHAPES)}")
    print(write_model_folder(name, parent))
    return 0
