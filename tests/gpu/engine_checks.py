"""Checks of whole engines that hold for every model, however its weights are stored."""

from __future__ import annotations

from unittest.mock import patch

import torch

from pagebus.bus.messages import StepResult
from tests.gpu.engine.engine_cases import MAX_TOKENS, make_prompts
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS


def outputs_of(
    driver: Driver, prompts: list[list[int]], first: int, budget: int, preempted_at: int = 0
) -> list[tuple[list[int], list[int]]]:
    """Tokens of each prompt's answer and the bits of their log probabilities; seeds count from ``first`` on. Every
    second sequence that runs after ``preempted_at`` steps gives its blocks up, and is computed again."""
    scheduler = driver.scheduler(budget, seed=budget)
    sequences = [
        scheduler.add(prompt, MAX_TOKENS, temperature=0.8, seed=first + i, logprobs=0)
        for i, prompt in enumerate(prompts)
    ]
    bits: dict[int, list[int]] = {}

    def collect(result: StepResult) -> None:
        for row, values in zip(result.logprob_rows.tolist(), result.logprob_bits.tolist(), strict=True):
            bits.setdefault(int(result.sequence_ids[row]), []).append(values)

    for _ in range(preempted_at):
        plan = scheduler.plan()
        assert plan is not None
        result = driver.run_plan(plan)
        scheduler.process(result)
        collect(result)
    for sequence in scheduler.running[::2] if preempted_at else []:
        scheduler.preempt(sequence)
    driver.drive(scheduler, on_result=collect)
    return [(sequence.output, bits[sequence.sequence_id]) for sequence in sequences]


def scored(driver: Driver, prompts: list[list[int]]) -> list[list[float]]:
    """Logits of each prompt's last token, in one pass over all of them."""
    rows: list[torch.Tensor] = []
    model = driver.engine._loaded.runner.model
    original, found = model.logits, rows.append

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        result = original(hidden)
        found(result.float().cpu())
        return result

    scheduler = driver.scheduler(2048)
    for prompt in prompts:
        scheduler.add(prompt, 1)
    with patch.object(model, "logits", logits):
        driver.drive(scheduler, depth=1)
    return torch.cat(rows).tolist()


def check_graphs(driver: Driver) -> None:
    """Steps give the same tokens and bits replayed from graphs and launched one kernel at a time. The driver's graphs
    are gone afterwards."""
    prompts = make_prompts(DEFAULTS["vocab_size"], 30, seed=4)
    runner = driver.engine._loaded.runner
    assert runner.graphs is not None
    driver.synchronize()
    captured = [outputs_of(driver, prompts, 0, budget) for budget in (64, 2048)]
    runner.graphs = None
    assert [outputs_of(driver, prompts, 0, budget) for budget in (64, 2048)] == captured


def check_independence(driver: Driver) -> None:
    """64 requests have the same tokens, and log probabilities to the last bit, among others or alone, under budgets
    that cut prompts anywhere, and after a preemption."""
    prompts = make_prompts(DEFAULTS["vocab_size"], 64, 5)
    expected = outputs_of(driver, prompts, 0, 2048)
    for budget in (100, 65):
        assert outputs_of(driver, prompts, 0, budget) == expected, f"budget {budget}"
    for i in range(0, 64, 9):
        assert outputs_of(driver, prompts[i : i + 1], i, 199) == expected[i : i + 1], f"prompt {i} alone"
    for steps, budget in ((9, 2048), (15, 300)):
        assert outputs_of(driver, prompts, 0, budget, preempted_at=steps) == expected, f"preempted after {steps} steps"
    driver.synchronize()  # all graphs are there now
    assert outputs_of(driver, prompts, 0, 500) == expected
