"""With `--deterministic`, what a request is answered does not depend on others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagebus.bus.messages import StepResult
from tests.gpu.engine.engine_cases import BFLOAT16_SHAPE, MAX_TOKENS, SETTINGS, make_prompts
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import (
    make_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", ["llama3", "qwen3"])
def test_deterministic_requests_do_not_know_each_other(arch: str, dtype: str, tmp_path: Path) -> None:
    """Tokens and every bit of their log probabilities: 64 at once under budgets that cut prompts anywhere, down to
    single tokens, or each alone; and of those that are preempted, as if nothing had happened."""
    folder = make_model(tmp_path, arch, seed=22, **BFLOAT16_SHAPE)
    driver = Driver(folder, **SETTINGS | {"dtype": dtype, "deterministic": True, "max_num_seqs": 64})
    prompts = make_prompts(300, 64, 5)
    expected = outputs_of(driver, prompts, 0, 2048)

    for budget in (100, 65):
        assert outputs_of(driver, prompts, 0, budget) == expected, f"budget {budget}"
    for i in range(0, 64, 9):
        assert outputs_of(driver, prompts[i : i + 1], i, 199) == expected[i : i + 1], f"prompt {i} alone"
    for steps, budget in ((9, 2048), (15, 300)):
        assert outputs_of(driver, prompts, 0, budget, preempted_at=steps) == expected, f"preempted after {steps} steps"
    driver.synchronize()  # all graphs are there now
    assert outputs_of(driver, prompts, 0, 500) == expected
    driver.close()
