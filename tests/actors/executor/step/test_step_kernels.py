"""Steps are counted by what they ran: one value per step, which is that of the pass."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.layers.attention_pass import AttentionPass
from pagebus.actors.executor.layers.moe import EXPERT_WEIGHTS
from pagebus.actors.executor.layers.passes import AttentionPasses
from pagebus.actors.executor.metrics.kernels import KernelMetrics, always_dequantized
from pagebus.actors.executor.step.step_kernels import PLAIN_PRODUCTS, PRODUCTS, KernelChooser
from pagebus.actors.model.config import parse_config
from pagebus.actors.model.served import TINY
from pagebus.actors.telemetry.metrics import Metrics
from pagebus.kernels.attention.choice import AttentionChooser, AttentionPath, AttentionSetup, StepRows
from pagebus.kernels.attention.paged_attention import AttentionShape
from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.shapes import LinearKernel
from pagebus.kernels.quantized.coding import experts_kind_of, kind_of
from tests.actors.executor.small_engine import MAX_TOKENS
from tests.helpers.engine_driver import Driver
from tests.helpers.quantized.random_layouts import LAYOUTS, OTHERS

GPU = AttentionSetup(Target(80, 108), torch.float32, torch.float32, 4, 2, 32)


@pytest.mark.parametrize("budget", [3, 16, 40])
def test_a_step_is_counted_by_the_path_of_its_pass(
    driver: Driver, prompts: list[list[int]], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes alone, beside prompts, and prompts whose tokens are scored: what was chosen before the pass is what its
    batch gives."""
    runner = driver.engine._loaded.runner
    chooser = AttentionChooser(GPU)
    passes = AttentionPasses(runner._ops, AttentionShape(4, 2, 32, 4), chooser)
    begun: list[AttentionPath] = []

    def begin(batch: AttentionBatch) -> AttentionPass:
        if len(batch.slot_mapping):  # not that of the last layer
            begun.append(chooser.choose(batch.rows))
        return passes.begin(batch)

    monkeypatch.setattr(runner.model, "_begin", begin)
    monkeypatch.setattr(runner, "chooser", KernelChooser(chooser, runner.model.config))
    driver.engine.stats.kernels.clear()
    scheduler = driver.scheduler(budget)
    kinds: list[dict[str, Any]] = [{}, {"prompt_logprobs": 1}]
    for number, prompt in enumerate(prompts):
        scheduler.add(prompt, MAX_TOKENS, **kinds[number % 2])
    driver.drive(scheduler)

    counted: Counter[str] = Counter()
    for kernels, count in driver.engine.stats.kernels.items():
        counted[kernels.attention] += count
    assert counted == Counter(begun)
    assert {AttentionPath.FUSED_DECODE, AttentionPath.DECODE_PREFILL} <= set(counted)


def test_equal_steps_have_the_same_value(driver: Driver) -> None:
    """So that they are counted together, at the cost of one look-up."""
    config = driver.engine._loaded.runner.model.config
    chooser = KernelChooser(AttentionChooser(GPU), config)
    decode = chooser.choose(StepRows(40, False), 40, 40)
    assert chooser.choose(StepRows(60, False), 60, 60) is decode
    assert chooser.choose(StepRows(65, False), 65, 65) is not decode
    assert tuple(decode.products) == PRODUCTS


@pytest.mark.parametrize("deterministic", [False, True])
def test_without_gates_there_is_one_matrix_before_down(deterministic: bool) -> None:
    """Its product is plain, and no norm before it is done by halves."""
    fields = {**TINY, "architectures": ["Starcoder2ForCausalLM"], "hidden_size": 4096, "intermediate_size": 16384}
    setup = replace(GPU, dtype=torch.bfloat16, cache_dtype=torch.bfloat16, deterministic=deterministic)
    products = KernelChooser(AttentionChooser(setup), parse_config(fields, {})).products(8, 8)
    assert tuple(products) == PLAIN_PRODUCTS
    assert products["up"].form == "plain"
    assert products["o"].form != "residual"


def test_the_summary_names_kernels_by_tokens(driver: Driver) -> None:
    """Of a GPU that was measured; the line of attention has all paths there may be."""
    config = replace(
        driver.engine._loaded.runner.model.config, hidden_size=4096, intermediate_size=14336, num_heads=32,
        num_kv_heads=8, head_dim=128, vocab_size=128256,
    )  # fmt: skip
    setup = AttentionSetup(Target(90, 132), torch.bfloat16, torch.bfloat16, 32, 8, 128, backend="torch")
    lines = KernelChooser(AttentionChooser(setup), config).summary()
    assert lines["attention"] == "cudnn_prefill, decode_prefill, prefill, fused_decode, decode"
    assert lines["qkv"].startswith("skinny_gemm 1 to ")
    assert lines["qkv"].endswith("cublas from 33 tokens")
    assert lines.keys() == {"attention", *PRODUCTS}


@pytest.mark.parametrize(("name", "counts"), [("int4 groups of 128", [384, 512, 768, 1024]), ("fp8 rows", [])])
def test_a_start_runs_every_wide_bucket_with_kernels(driver: Driver, name: str, counts: list[int]) -> None:
    """Of words of 4 bits there are some above 256 tokens; what is the library's there is not run."""
    config = replace(
        driver.engine._loaded.runner.model.config, hidden_size=4096, intermediate_size=14336, num_heads=32,
        num_kv_heads=8, head_dim=128, vocab_size=128256,
    )  # fmt: skip
    setup = AttentionSetup(Target(90, 132), torch.bfloat16, torch.bfloat16, 32, 8, 128, backend="torch")
    kind = kind_of(LAYOUTS[name](64, 256, torch.device("cpu")))
    chooser = KernelChooser(AttentionChooser(setup), config, dict.fromkeys(("qkv", "o", "gate_up", "down"), kind))
    assert chooser.wide_counts() == counts
    assert ("hopper_words" in chooser.summary()["gate_up"]) == bool(counts)
    fixed = KernelChooser(AttentionChooser(replace(setup, deterministic=True)), config, dict(gate_up=kind))
    assert fixed.wide_counts() == []


@pytest.mark.parametrize(("name", "kernel"), [("mxfp4", "moe_coded"), ("int4 groups of 24", "moe_dequantized")])
def test_experts_in_quantized_layouts(name: str, kernel: str) -> None:
    """Their kernel has a name of its own; those that no kernel reads are told, as each step is slow with them."""
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    fields = {**TINY, "architectures": ["Qwen3MoeForCausalLM"], **moe}
    setup = replace(GPU, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    kind = experts_kind_of((LAYOUTS | OTHERS)[name](64, 256, torch.device("cpu")))
    chooser = KernelChooser(AttentionChooser(setup), parse_config(fields, {}), dict.fromkeys(EXPERT_WEIGHTS, kind))
    assert chooser.summary()["experts"] == kernel
    assert always_dequantized(chooser.summary()) == (["experts"] if kernel == "moe_dequantized" else [])


def test_what_the_cost_model_decided_is_told_with_estimates(driver: Driver) -> None:
    """Products that nobody has measured, each bucket with its kernel and microseconds; measured ones are left out."""
    config = replace(
        driver.engine._loaded.runner.model.config, hidden_size=4096, intermediate_size=11008, num_heads=32,
        num_kv_heads=8, head_dim=128, vocab_size=128256,
    )  # fmt: skip
    setup = AttentionSetup(Target(90, 132), torch.bfloat16, torch.bfloat16, 32, 8, 128, backend="torch")
    lines = KernelChooser(AttentionChooser(setup), config).estimated()
    assert set(lines) == {"gate_up", "down"}
    assert re.match(r"2: \w+ [\d.]+ us, 4: ", lines["gate_up"]), (
        "one row has what completes a norm: a rule, no estimate"
    )
    assert "256: cublas" in lines["gate_up"]


def test_counters_follow_the_counts(driver: Driver) -> None:
    """Steps of several kinds that share a path or a kernel are added up; what was told before is not told again."""
    chooser = KernelChooser(AttentionChooser(GPU), driver.engine._loaded.runner.model.config)
    few, many = chooser.choose(StepRows(1, False), 1, 1), chooser.choose(StepRows(32, False), 32, 32)
    prompt = chooser.choose(StepRows(0, True), 300, 1)
    metrics = Metrics()
    kept = KernelMetrics(metrics, "executor-0")
    for counts in ({few: 1}, {few: 5, many: 2, prompt: 1}, {few: 5, many: 2, prompt: 1}):
        kept.update(counts)

    found = {
        (name, *sorted(value for label, value in labels.items() if label != "engine")): data["value"]
        for name, labels, data in metrics.snapshot()["series"]
    }
    assert found["pagebus:attention_steps_total", "fused_decode"] == 7
    assert found["pagebus:attention_steps_total", "prefill"] == 1
    assert found["pagebus:product_steps_total", LinearKernel.CUBLAS, "qkv"] == 8
