"""Every benchmark on a CPU with the shipped model or a smaller one, at tiny sizes: it ends, and its figures hold
together. No time is asserted."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import pagebus.actors.shipped_model
from pagebus.actors.commands.cli import main
from pagebus.bus.private_redis.server import find_redis_server
from tests.helpers.model_factory import make_model
from tests.system.serving import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_redis_server() is None, reason="no redis-server on PATH"),
]
CPU = ["--device", "cpu", "--threads", "1", "--swap-space", "0.02", "--cpu-kv-cache-gib", "0.1"]

ONE_DEPLOYMENT = [
    "--enable-prefix-caching", "--max-model-len", "700", "--num-gpu-blocks-override", "46", "--max-num-seqs", "16",
]  # fmt: skip
"""Settings in which the workloads would differ; the blocks are those of ``swap``."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model for workloads of many tokens, which the shipped one computes for twice as long."""
    folder = tmp_path_factory.mktemp("small")
    return ["--model", str(make_model(folder, "llama2", seed=0, max_position_embeddings=1024))]


def run(path: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of a benchmark that ends well."""
    assert main(["bench", *arguments, "--json", str(path)]) == 0
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def check_figures(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The medians of each point, after what must be true of all."""
    medians = {}
    for point in results["points"]:
        figures = {name: each["median"] for name, each in point["figures"].items()}
        for name, each in point["figures"].items():
            assert each["low"] <= each["median"] <= each["high"], (point["name"], name)
        assert 0 < figures["gpu_busy_share"] <= 1, point["name"]
        assert 0 < figures["ttft_ms_p50"] <= figures["ttft_ms_p99"] <= figures["seconds"] * 1e3
        assert figures["output_tokens_per_s"] > 0
        assert figures["scheduler_ms"] > 0
        assert figures["plan_ms"] > 0
        assert len(point["runs"]) == results["repeats"]
        medians[point["name"]] = figures
    return medians


def test_engine(tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Rows in the order asked for; a cached prefix is found on the device, and in the host tier."""
    workloads = ["decode", "mixed256", "chat1000", "prefill", "prefix", "swap"]
    results = run(
        tmp_path / "r.json", "engine", "--workloads", *workloads, "--batches", "1", "3", "--scale", "0.02",
        "--requests", "6", "--repeats", "1", *ONE_DEPLOYMENT, *small, *CPU,
    )  # fmt: skip
    figures = check_figures(results)
    assert list(figures) == [
        "decode/1", "decode/3", "mixed256", "chat1000", "prefill",
        "prefix/cold", "prefix/hot", "swap/cold", "swap/device", "swap/host",
    ]  # fmt: skip
    decode = figures["decode/1"]
    assert decode["step_ms_p50"] <= decode["step_ms_p99"]
    assert decode["tb_per_s"] > 0
    assert figures["mixed256"]["steps"] > 1
    assert figures["prefix/cold"]["cached_tokens"] == figures["swap/cold"]["cached_tokens"] == 0
    assert figures["prefix/hot"]["cached_tokens"] == 288  # of 300, in blocks of 16
    assert figures["swap/device"]["cached_tokens"] == figures["swap/host"]["cached_tokens"] == 320  # of 326
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:11]] == list(figures)


def test_long_contexts(tmp_path: Path, small: list[str]) -> None:
    """Longer prompts are read in more steps, with adapters too."""
    results = run(
        tmp_path / "r.json", "engine", "--workloads", "longctx", "--scale", "0.005", "--repeats", "1",
        "--max-num-batched-tokens", "64", "--loras", "2", "--lora-rank", "4", *small, *CPU,
    )  # fmt: skip
    assert {"--enable-lora", "--max-loras=2", "--max-lora-rank=4"} < set(results["settings"])
    figures = check_figures(results)
    steps = [figures[f"longctx/{name}"]["steps"] for name in ("8k", "32k", "131k")]
    assert steps == [1, 3, 11]  # prompts of 41, 164 and 655 tokens


def test_profile(tmp_path: Path) -> None:
    """The trace holds the steps asked for, on all lanes that a CPU has; the picture is drawn."""
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    arguments = ["--requests", "4", "--scale", "0.05", "--steps", "10", "--out", str(trace), "--picture", str(picture)]
    arguments += ["--loras", "2"]
    assert main(["bench", "profile", *arguments, *CPU]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {each["cat"] for each in events if each["ph"] in "Xb"} == {
        "scheduler", "bus: plans", "bus: results", "device"
    }  # fmt: skip
    plans = [each for each in events if each["ph"] == "b" and each["cat"] == "bus: plans"]
    assert len(plans) == 10
    assert picture.read_text().startswith("<svg")


def test_start(tmp_path: Path) -> None:
    """A start has a phase for each actor, and ends with a token."""
    results = run(tmp_path / "r.json", "start", "--repeats", "1", *CPU)
    (point,) = results["points"]
    kinds = {name.partition(":")[0] for name in point["figures"] if name.endswith("from process to ready")}
    assert kinds == {"ingress", "jobs", "tokenizer", "scheduler", "executor", "detokenizer"}
    assert point["figures"]["seconds"]["median"] >= max(ended for _, ended in point["runs"][0].values())


@pytest.mark.parametrize("options", [[], ["--backend", "openai-chat", "--processes", "2"]], ids=["ids", "chats"])
async def test_serve(tmp_path: Path, options: list[str]) -> None:
    """A server is loaded over HTTP by the same command whatever it is; every request gives all its tokens."""
    path = tmp_path / "r.json"
    async with serving(Path(pagebus.actors.shipped_model.__file__).parent) as client:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pagebus.actors.commands.cli", "bench", "serve", "--base-url", client.url,
            "--workload", "chat256", "--num-prompts", "8", "--scale", "0.05", "--max-concurrency", "3",
            "--num-warmups", "1", "--goodput", "ttft:1e9", "--json", str(path), *options,
        )  # fmt: skip
        assert await process.wait() == 0
    figures = {name: each["median"] for name, each in json.loads(path.read_text())["points"][0]["figures"].items()}
    assert (figures["requests"], figures["failed"], figures["good_share"]) == (8, 0, 1)
    assert figures["peak_concurrency"] <= 3
    assert 0 < figures["ttft_ms_p50"] <= figures["e2el_ms_p99"]


def test_shapes_are_written(tmp_path: Path) -> None:
    """A named shape is a folder that can be served."""
    assert main(["bench", "shape", "qwen06b", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "qwen06b" / "config.json").read_text())["hidden_size"] == 1024
