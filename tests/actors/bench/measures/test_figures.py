"""Figures of a run, with numbers that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagebus.actors.bench.driver.shapes import write_model_folder
from pagebus.actors.bench.measures.costs import Costs
from pagebus.actors.bench.measures.figures import bus_times, counted_steps, make_figures, summary, token_gaps
from pagebus.actors.bench.measures.watch import Run, Step
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.settings import Settings


def step(number: int, done_s: float, *, decodes: int, prefill: int = 0, sampled: int | None = None) -> Step:
    """A step that was planned 30 ms, received 25 ms and launched 20 ms before its end, and kept the device 10 ms."""
    return Step(
        number=number,
        planned_s=done_s - 0.03,
        received_s=done_s - 0.025,
        launched_s=done_s - 0.02,
        done_s=done_s,
        busy_s=0.01,
        decodes=decodes,
        decode_context=100 * decodes,
        prefill_tokens=prefill,
        prefill_pairs=prefill * (prefill + 1) / 2,
        num_sampled=decodes if sampled is None else sampled,
    )


@pytest.fixture
def run() -> Run:
    """Two requests sent at 100 s: a prompt step for both, then three decodes of both, 20 ms apart."""
    steps = [step(1, 100.05, decodes=0, prefill=8, sampled=2)]
    steps += [step(number, 100.05 + 0.02 * (number - 1), decodes=2) for number in (2, 3, 4)]
    return Run(
        submitted_s=100.0,
        prompt_tokens=8,
        steps=steps,
        requests=np.array([0, 1] * 4, np.int32),
        token_indexes=np.repeat(np.arange(4, dtype=np.int32), 2),
        token_s=np.repeat([each.done_s for each in steps], 2),
        cached_tokens=0,
        scheduler_s=0.004,
    )


COSTS = Costs(
    layer_weights=1000, head_weights=100, weight_bytes=2, kv_bytes_per_token=10.0, flops_per_pair=4, tied=True
)


def test_rates_and_latencies(run: Run) -> None:
    """Rates count from the submission to the last token; the device's time is over all of it."""
    figures = make_figures(run, COSTS)
    assert figures["seconds"] == pytest.approx(0.11)
    assert figures["output_tokens_per_s"] == pytest.approx(8 / 0.11)
    assert figures["prompt_tokens_per_s"] == pytest.approx(8 / 0.11)
    assert figures["ttft_ms_p50"] == pytest.approx(50)
    assert figures["itl_ms_p99"] == pytest.approx(20)
    assert figures["gpu_busy_share"] == pytest.approx(0.04 / 0.11)
    assert figures["scheduler_ms"] == pytest.approx(1)
    assert figures["plan_ms"] == pytest.approx(5)


def test_only_full_decode_steps_count_for_a_batch(run: Run) -> None:
    """A decode sweep counts steps of the whole batch that follow one with as many tokens."""
    steps, seconds = counted_steps(run.steps, 2)
    assert [each.number for each in steps] == [2, 3, 4]
    assert seconds == pytest.approx([0.02] * 3)
    assert counted_steps(run.steps, 3)[0] == []


def test_all_steps_count_without_a_batch(run: Run) -> None:
    """The first step counts from its launch, the others from the result before."""
    steps, seconds = counted_steps(run.steps, 0)
    assert len(steps) == 4
    assert seconds == pytest.approx([0.02] * 4)


def test_bytes_and_operations(run: Run) -> None:
    """A decode step reads all weights and the keys and values of its context, and writes those of its tokens."""
    decode = run.steps[1]
    assert COSTS.bytes_of(decode) == 2 * 1100 + 10 * (200 + 2)
    assert COSTS.flops_of(decode) == 2 * 1100 * 2 + 4 * 200
    figures = make_figures(run, COSTS, batch=2)
    assert figures["tb_per_s"] == pytest.approx(COSTS.bytes_of(decode) / 0.02 / 1e12)
    assert figures["tflop_per_s"] == pytest.approx(COSTS.flops_of(decode) / 0.02 / 1e12)


def test_gaps_are_within_a_request(run: Run) -> None:
    """Tokens of different requests are not neighbours, whatever order they come in."""
    shuffled = np.random.default_rng(0).permutation(len(run.token_s))
    for name in ("requests", "token_indexes", "token_s"):
        setattr(run, name, getattr(run, name)[shuffled])
    assert token_gaps(run) == pytest.approx([0.02] * 6)


def test_results_wait_for_the_next_planning() -> None:
    """The way back of a result ends where the first planning after it begins; the last result has none."""
    steps = [step(1, 1.0, decodes=1), step(2, 1.034, decodes=1)]
    assert bus_times(steps) == pytest.approx({"plan_ms": 5.0, "result_ms": 4.0})


def test_medians_with_their_spread() -> None:
    """A figure is that of the runs that have it."""
    figures = summary([{"a": 3.0}, {"a": 1.0}, {"a": 2.0, "b": 1.0}])
    assert figures == {
        "a": {"median": 2.0, "low": 1.0, "high": 3.0},
        "b": {"median": 1.0, "low": 1.0, "high": 1.0},
    }


def test_costs_of_the_published_shapes(tmp_path: Path) -> None:
    """Llama-3.1-8B has 7.5e9 weights in its products, 8.03e9 in all, and 128 KiB of keys and values per token."""
    config = ModelConfig.load(write_model_folder("llama8b", tmp_path))
    costs = Costs.of(config, {"dtype": "bfloat16", "block_bytes": 2 * 2**20, "block_size": 16})
    assert costs.layer_weights + costs.head_weights == 7_504_658_432
    assert costs.all_bytes == 2 * 8_029_995_008
    assert costs.kv_bytes_per_token == 131_072
    assert costs.flops_per_pair == 4 * 4096 * 32


@pytest.mark.parametrize(("method", "bits"), [("fp8", 8), ("int8", 8), ("int4", 4 + (32 + 8) / 128)])
def test_costs_of_quantized_shapes(method: str, bits: float, tmp_path: Path) -> None:
    """Layers' weights take their codes and scales; the head stays as it is."""
    plain = ModelConfig.load(write_model_folder("llama8b", tmp_path))
    info = {"dtype": "bfloat16", "block_bytes": 2 * 2**20, "block_size": 16}
    costs = Costs.of(with_quantization(Settings(quantization=method), plain), info)
    assert costs.bytes_of(step(0, 1.0, decodes=0)) == costs.layer_weights * bits / 8
    assert costs.all_bytes == costs.layer_weights * bits / 8 + 2 * 2 * costs.head_weights
