"""The engine on CUDA: Triton kernels and CUDA graphs give the tokens of transformers.

Runs on a bare GPU host too: ``PYTHONPATH=. pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib
tests/gpu/engine/test_engine.py``.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pagebus.kernels.linear.linear
from pagebus.actors.executor.device.device import KV_DTYPES
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.step.runner import Runner
from pagebus.bus.messages import StepResult
from pagebus.kernels.linear.dispatch import LinearChoice, choose_residual_product
from pagebus.kernels.linear.shapes import LinearKernel
from pagebus.kernels.linear.skinny_gemm import TileConfig
from tests.gpu.engine.engine_cases import BFLOAT16_SHAPE, MAX_TOKENS, SETTINGS, make_prompts
from tests.helpers.engine_driver import Driver, Grown, HandScheduler
from tests.helpers.model_factory import (
    REFERENCE_CONFIGS,
    ReferenceConfig,
    load_reference,
    make_model,
    make_reference,
    reference_generate,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {11: 4.0, 12: -3.0}, "min_tokens": 5, "end_token_ids": (1, 2, 3)},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(5, 300, 2)), "logprobs": 3},
    {"bad_words_token_ids": ((7,), (9, 4), (12, 200, 31)), "prompt_logprobs": 2},
]


def runner_of(driver: Driver) -> Runner:
    return driver.engine._loaded.runner


def run(driver: Driver, prompts: list[list[int]], budget: int, **params: Any) -> list[list[int]]:
    scheduler = driver.scheduler(budget, seed=budget)
    sequences = [scheduler.add(prompt, MAX_TOKENS, **params) for prompt in prompts]
    driver.drive(scheduler)
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("config", REFERENCE_CONFIGS, ids=lambda config: config.name)
def test_greedy_tokens_equal_transformers(config: ReferenceConfig, tmp_path: Path) -> None:
    """Float32: alone and 32 at once, budgets of 16, 64 and 2048 tokens, with graphs and without."""
    folder = make_reference(tmp_path, config)
    prompts = make_prompts(config.vocab_size, 32, config.seed)
    expected = reference_generate(folder, prompts, MAX_TOKENS)
    driver = Driver(folder, **SETTINGS)
    runner = runner_of(driver)
    graphs = runner.graphs
    assert graphs is not None

    for budget in (16, 64, 2048):
        assert run(driver, prompts, budget) == expected, f"budget {budget}"
    assert run(driver, prompts[:1], 2048) == expected[:1]
    runner.graphs = None
    assert run(driver, prompts, 2048) == expected, "without graphs"
    driver.close()


@pytest.mark.parametrize("cache", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("config", REFERENCE_CONFIGS[3::3], ids=lambda config: config.name)
def test_a_cache_of_one_byte_gives_the_tokens_of_a_cpu(config: ReferenceConfig, cache: str, tmp_path: Path) -> None:
    """Scales found at start or with each token, writes and both kernels do what the references do, with graphs. Where a
    sum's last bit rounds a number to its other neighbour an answer may differ."""
    folder = make_reference(tmp_path, config)
    prompts = make_prompts(config.vocab_size, 20, config.seed)
    answers = []
    for device in ("cuda", "cpu"):
        driver = Driver(folder, **SETTINGS | {"device": device, "kv_cache_dtype": cache})
        assert driver.info.kv_cache_dtype == str(KV_DTYPES[cache]).removeprefix("torch.")
        answers.append([run(driver, prompts, budget) for budget in (16, 2048)])
        driver.close()
    pairs = [pair for got, expected in zip(*answers, strict=True) for pair in zip(got, expected, strict=True)]
    assert sum(got == expected for got, expected in pairs) >= 0.9 * len(pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[12])


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[Driver]:
    driver = Driver(folder, **SETTINGS)
    yield driver
    driver.close()


def sampled(scheduler: HandScheduler, prompts: list[list[int]]) -> list[Grown]:
    return [
        scheduler.add(prompt, MAX_TOKENS, **({"seed": i} | EXTRAS[i % len(EXTRAS)])) for i, prompt in enumerate(prompts)
    ]


def test_sampling_equals_the_cpu(driver: Driver, folder: Path) -> None:
    """Every kind of sampling, in graphs and beside them, draws what the plain torch engine draws."""
    prompts = make_prompts(300, 21, seed=1)
    cpu = Driver(folder, **SETTINGS | {"device": "cpu", "threads": 4})
    on_cpu, on_gpu = cpu.scheduler(64), driver.scheduler(64)
    expected, answers = sampled(on_cpu, prompts), sampled(on_gpu, prompts)

    cpu.drive(on_cpu)
    driver.drive(on_gpu)
    cpu.close()

    assert [(sequence.output, sequence.end) for sequence in answers] == [
        (sequence.output, sequence.end) for sequence in expected
    ]


class Poison:
    """Overwrites, before every step, what no step may read: the inputs of the last one, and the dummy slot."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._run = runner, runner.run
        self.buckets: list[Any] = []

    def run(self, work: Any) -> torch.Tensor | None:
        runner = self._runner
        inputs = runner.inputs
        for each in (inputs.input_ids, inputs.positions, inputs.slot_mappings, inputs.context_lens):
            each.fill_(10**6)
        runner.state.tokens[-1] = -7
        runner.state.block_tables[-1] = 10**6
        bucket = runner._bucket(work)
        self.buckets += [] if bucket is None else [bucket]
        return self._run(work)


@pytest.mark.parametrize("seed", range(4))
def test_graphs_equal_eager_in_random_mixed_batches(driver: Driver, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token: prompts of any length in chunks beside decodes, three times as many sequences as slots, blocks
    that held NaN before, buffers full of garbage."""
    rng, runner = random.Random(seed), runner_of(driver)
    graphs = runner.graphs
    assert graphs is not None
    jobs = [
        ([rng.randrange(300) for _ in range(rng.choice([1, 2, 7, 16, 31, 64, 65, 100, 190]))], rng.randint(1, 50),
         rng.choice(EXTRAS))
        for _ in range(100)
    ]  # fmt: skip
    budget, outputs = rng.choice([40, 90, 300, 1500]), []

    for used in (graphs, None):
        runner.graphs = used
        with torch.inference_mode():
            runner.kv_cache.fill_(torch.nan)
        torch.cuda.current_stream().synchronize()
        scheduler = driver.scheduler(budget, seed)
        poison = Poison(runner)
        monkeypatch.setattr(runner, "run", poison.run)
        sequences = [scheduler.add(prompt, count, **extras) for prompt, count, extras in jobs]
        driver.drive(scheduler, depth=3)
        monkeypatch.undo()
        outputs.append([sequence.output for sequence in sequences])
        assert any(bucket.spans for bucket in poison.buckets) == (used is not None)
    runner.graphs = graphs

    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_steps_in_pieces_give_the_tokens_of_transformers(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of more tokens than there are whole graphs for: prompts, and chunks of them beside decodes, with buffers
    full of garbage."""
    monkeypatch.setattr("pagebus.actors.executor.loading.limits.MAX_GRAPH_TOKENS", 256)
    folder, rng = make_model(tmp_path, arch, seed=9), random.Random(9)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(60, 200))] for _ in range(48)]
    expected = reference_generate(folder, prompts, MAX_TOKENS)
    driver = Driver(folder, **SETTINGS)
    driver.synchronize()

    for budget in (2048, 1100):
        poison = Poison(runner_of(driver))
        monkeypatch.setattr(runner_of(driver), "run", poison.run)
        assert run(driver, prompts, budget) == expected
        assert any(bucket.pieces for bucket in poison.buckets)
        monkeypatch.undo()
    driver.close()


def test_graphs_are_captured_beside_the_steps(folder: Path) -> None:
    """Those that are always wanted, and those that a step missed; answers are the same meanwhile and afterwards."""
    driver = Driver(folder, **SETTINGS)
    graphs = runner_of(driver).graphs
    assert graphs is not None
    prompts, outputs = make_prompts(300, 32, seed=5), []
    deadline = time.monotonic() + 60
    while not outputs or not graphs.complete:
        outputs.append(run(driver, prompts, 2048))
        assert time.monotonic() < deadline
    num_graphs = len(graphs._captured)
    outputs.append(run(driver, prompts, 2048))

    assert outputs == outputs[:1] * len(outputs)
    assert len(graphs._captured) == num_graphs
    driver.close()


def test_log_probabilities_equal_transformers(driver: Driver, folder: Path) -> None:
    """Of outputs from graphs and of prompts in chunks, beside rows that ask for nothing."""
    prompts = make_prompts(300, 30, seed=4)
    scheduler = driver.scheduler(100)
    sequences = [
        scheduler.add(prompt, MAX_TOKENS, logprobs=None if i % 3 == 2 else i % 3 * 10,
                      prompt_logprobs=None if i % 4 else 5)
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    outputs: dict[int, list[float]] = {}
    scored: dict[int, list[float]] = {}

    def collect(result: StepResult) -> None:
        for row, bits in zip(result.logprob_rows.tolist(), result.logprob_bits.view(np.float32).tolist(), strict=True):
            outputs.setdefault(int(result.sequence_ids[row]), []).append(bits)
        values, first = result.prompt_bits.view(np.float32).tolist(), 0
        for sequence_id, length in zip(
            result.prompt_sequence_ids.tolist(), result.prompt_lengths.tolist(), strict=True
        ):
            scored.setdefault(sequence_id, []).extend(values[first : first + length])
            first += length

    driver.drive(scheduler, depth=3, on_result=collect)

    reference = load_reference(folder)
    for i, sequence in enumerate(sequences):
        ids = sequence.prompt + sequence.output
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].log_softmax(1)
        each = [float(expected[place - 1, ids[place]]) for place in range(1, len(ids))]
        count = len(sequence.prompt) - 1
        assert outputs.get(sequence.sequence_id, []) == pytest.approx([] if i % 3 == 2 else each[count:], abs=1e-4)
        assert scored.get(sequence.sequence_id, []) == pytest.approx([] if i % 4 else each[:count], abs=1e-4)


def test_end_tokens_free_slots_under_pipelining(driver: Driver, folder: Path) -> None:
    """With five plans in flight, rows beyond an end are dropped and slots and blocks come back."""
    prompts = make_prompts(300, 40, seed=2)
    expected = reference_generate(folder, prompts, MAX_TOKENS)
    scheduler = driver.scheduler(100)
    sequences = [
        scheduler.add(prompt, MAX_TOKENS, end_token_ids=(answer[5],))
        for prompt, answer in zip(prompts, expected, strict=True)
    ]

    driver.drive(scheduler, depth=5)

    assert [sequence.output for sequence in sequences] == [answer[: answer.index(answer[5]) + 1] for answer in expected]
    assert driver.engine.num_occupied_slots == 0
    assert sorted(scheduler.free_blocks) == list(range(700))


@pytest.mark.parametrize("halves", [False, True], ids=["whole norms", "halves"])
@pytest.mark.parametrize("arch", ["llama2", "llama3", "mistral", "qwen2", "qwen3"])
def test_bfloat16_logits_are_near_float32(
    arch: str, halves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative error at most 2e-2 for prompt and decode, against float32 with the same (rounded) weights; also where
    products of few tokens do half of the norms, as for measured shapes.

    The weights are as wide as these architectures begin with (0.02). On such models transformers' own bfloat16 differs
    from its float32 by up to 1.4e-2.
    """
    split, chosen = TileConfig(64, 16, 64, 4, 4, 2, tma=True), set()

    def choose_halves(num_tokens: int, *given: Any, **words: Any) -> LinearChoice:
        choice = choose_residual_product(num_tokens, *given, **words)
        if words["norms"] and num_tokens <= 16:
            choice = LinearChoice(LinearKernel.SKINNY_GEMM, "residual", split, "halves are wanted")
        chosen.add(choice.form)
        return choice

    if halves:
        monkeypatch.setattr(pagebus.kernels.linear.linear, "choose_residual_product", choose_halves)
    folder = make_model(tmp_path, arch, seed=21, std=0.02, **BFLOAT16_SHAPE)
    reference = load_reference(folder)
    for weight in reference.parameters():
        weight.data = weight.data.bfloat16().float()
    driver = Driver(folder, **SETTINGS | {"dtype": "bfloat16"})
    runner = runner_of(driver)
    seen: list[torch.Tensor] = []
    graphs: Any = runner.graphs
    run_graph = graphs.run

    def keeping(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, logits, tokens = run_graph(*arguments)
        seen.append(logits[:1].clone())
        return hidden, logits, tokens

    graphs.run = keeping
    scheduler = driver.scheduler()
    sequence = scheduler.add(make_prompts(driver.info.vocab_size, 1, 3)[0] + [5, 6, 7], 8)
    while (plan := scheduler.plan()) is not None:
        scheduler.process(driver.run_plan(plan))
    driver.close()

    ids = torch.tensor([sequence.prompt + sequence.output[:-1]])
    with torch.inference_mode():
        exact = reference(ids).logits[0, len(sequence.prompt) - 1 :]
    assert len(seen) == len(exact) == 8
    assert ("residual" in chosen) == halves
    for row, wanted in zip(seen, exact, strict=True):
        error = (row[0].cpu() - wanted).norm() / wanted.norm()
        assert error < 2e-2


def test_the_cache_takes_the_wanted_share(folder: Path) -> None:
    """A quarter of the GPU means a quarter, and the cache holds the sequences it says.

    Nobody else may take or give back memory meanwhile: it needs a GPU of its own.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    settings = SETTINGS | {"num_gpu_blocks_override": None, "gpu_memory_utilization": (total - free) / total + 0.25}
    driver = Driver(folder, **settings)
    after, _ = torch.cuda.mem_get_info()
    cache = runner_of(driver).kv_cache

    assert cache.shape[0] == driver.info.num_blocks
    assert 0.2 * total < cache.numel() * cache.element_size() < 0.25 * total
    assert free - after < 0.26 * total
    driver.close()


def test_a_share_too_small_for_anything_is_refused(folder: Path) -> None:
    """With the numbers."""
    settings = SETTINGS | {"num_gpu_blocks_override": None, "gpu_memory_utilization": 1e-4}

    with pytest.raises(EngineError, match="no GPU memory is left for the KV cache"):
        Driver(folder, **settings)
