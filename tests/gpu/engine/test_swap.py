"""Copies between the tiers on a GPU: content, order against steps, and tokens that do not change."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagebus.actors.executor.memory.swap import CopyWatch
from pagebus.bus.messages import StepPlan
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver, ints
from tests.helpers.model_factory import REFERENCE_CONFIGS, ReferenceConfig, make_reference, reference_generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

MAX_TOKENS = 16
SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 40, "swap_space": 0.5,
}  # fmt: skip
ONE_PER_ARCHITECTURE = list({config.arch: config for config in REFERENCE_CONFIGS}.values())


def make_prompts(vocab_size: int, count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.choice((2, 16, 33, 100, 200)))] for _ in range(count)]


def until_ready(driver: Driver) -> int:
    """Wait until all host memory is there."""
    memory = driver.engine._loaded.copies.memory
    assert memory.wait(memory.num_blocks, timeout_s=60)
    return driver.engine.num_host_blocks


@pytest.mark.parametrize("config", ONE_PER_ARCHITECTURE, ids=lambda config: config.arch)
def test_swapped_sequences_give_the_same_tokens(config: ReferenceConfig, tmp_path: Path) -> None:
    """24 sequences over 40 blocks, preempted by swap again and again, with one to four steps in flight, with graphs and
    without; a second time with what the host tier kept of them."""
    folder = make_reference(tmp_path, config)
    prompts = make_prompts(config.vocab_size, 24, config.seed)
    expected = reference_generate(folder, prompts, MAX_TOKENS)
    driver = Driver(folder, **SETTINGS)
    until_ready(driver)
    runner = driver.engine._loaded.runner
    graphs = runner.graphs
    num_in = num_hits = 0
    for depth in (1, 2, 3, 4):
        runner.graphs = graphs if depth % 2 else None
        for caching in (True, False):
            core = CoreDriver(driver, depth=depth, preemption_mode="swap", enable_prefix_caching=caching)
            for again in range(2 if caching else 1):
                answers = [core.send(f"{again} {i}", prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)]
                core.run()
                assert [answer.tokens for answer in answers] == expected, f"depth {depth}, caching {caching}"
            num_in += core.replica.host_tier.num_in
            num_hits += core.replica.host_tier.num_hits
    driver.close()

    assert num_in > 0
    assert num_hits > 0


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[12])
    driver = Driver(folder, **SETTINGS)
    until_ready(driver)
    yield driver
    driver.close()


def test_random_copies_leave_what_their_order_says(driver: Driver) -> None:
    """300 plans of random copies both ways, any block again and again, against the same on a list."""
    rng = random.Random(5)
    cache = driver.engine._loaded.runner.kv_cache
    memory = driver.engine._loaded.copies.memory
    num_hosts = 20
    with torch.inference_mode():
        cache.copy_(torch.arange(40, device=cache.device).view(-1, *[1] * (cache.dim() - 1)).expand_as(cache))
    driver.synchronize()
    device, host = list(range(40)), [-1] * num_hosts
    driver.scheduler()
    for step in range(1, 301):
        out = [(rng.randrange(40), rng.randrange(num_hosts)) for _ in range(rng.randrange(6))]
        for block, target in out:
            host[target] = device[block]
        full = [index for index in range(num_hosts) if host[index] >= 0]
        back = [(rng.choice(full), rng.randrange(40)) for _ in range(rng.randrange(6))] if full else []
        for source, block in back:
            device[block] = host[source]
        plan = StepPlan(
            step=step, planned_s=0.0, num_decodes=0,
            swap_out_blocks=ints([a for a, _ in out]), swap_out_hosts=ints([b for _, b in out]),
            swap_in_hosts=ints([a for a, _ in back]), swap_in_blocks=ints([b for _, b in back]),
        )  # fmt: skip
        driver.engine.submit(plan, driver.epoch)
    for _ in range(300):
        driver.result()
    driver.synchronize()

    flat = cache.view(40, -1)
    assert flat[:, 0].cpu().int().tolist() == device
    assert torch.equal(flat.min(1).values, flat.max(1).values)
    for index, value in enumerate(host):
        assert value < 0 or (memory.block(index).view(np.float32) == value).all(), f"host block {index}"


def test_copies_are_reported_done(driver: Driver) -> None:
    """A step's result says later, or at once, that its copies are done."""
    driver.scheduler()
    blocks = ints(range(20))
    first = driver.run_plan(
        StepPlan(step=1, planned_s=0.0, num_decodes=0, swap_out_blocks=blocks, swap_out_hosts=blocks)
    )
    driver.synchronize()
    second = driver.run_plan(StepPlan(step=2, planned_s=0.0, num_decodes=0))

    assert first.copied_step in (0, 1)
    assert second.copied_step == 2
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert CopyWatch().step_done(7, event) == 7


def test_rates_are_measured(driver: Driver) -> None:
    """Several GB/s, and some thousand tokens of a tiny model."""
    assert driver.info.copy_bytes_per_s > 1e9
    assert driver.info.prefill_tokens_per_s > 1e3


def test_host_memory_is_locked_in_the_background_and_given_back(driver: Driver) -> None:
    """Being ready does not wait for it."""
    folder = Path(str(driver.settings.model))
    began = time.monotonic()
    large = Driver(folder, **SETTINGS | {"swap_space": 8.0})
    memory = large.engine._loaded.copies.memory
    ready_s = time.monotonic() - began
    assert until_ready(large) == memory.num_blocks
    print(f"ready in {ready_s:.2f} s, 8 GiB locked after {time.monotonic() - began:.2f} s")
    large.close()
    assert memory.num_ready == 0
