"""The oracle's tokens depend on the tokens before them and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.helpers.engine_driver import Driver
from tests.helpers.oracle import make_oracle

RANDOM = {"temperature": 1.0, "seed": 7, "top_p": 0.9}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = make_oracle(tmp_path_factory.mktemp("oracle"))
    driver = Driver(folder, device="cpu", load_format="dummy", max_num_seqs=8, swap_space=0, num_gpu_blocks_override=80)
    yield driver
    driver.close()


def outputs(driver: Driver, jobs: list[tuple[list[int], dict[str, float]]], budget: int, seed: int) -> list[list[int]]:
    """What the jobs give, computed together."""
    scheduler = driver.scheduler(budget, seed)
    sequences = [scheduler.add(prompt, 20, **params) for prompt, params in jobs]  # type: ignore[arg-type]
    driver.drive(scheduler)
    return [sequence.output for sequence in sequences]


def test_batches_chunks_and_blocks_change_nothing(driver: Driver) -> None:
    """Alone or with others, in one piece or in chunks, in whatever blocks: the same tokens, sampled ones too."""
    rng = random.Random(1)
    prompts = [[rng.randrange(driver.info.vocab_size) for _ in range(rng.randrange(1, 70))] for _ in range(12)]
    jobs = [(prompt, RANDOM if index % 2 else {}) for index, prompt in enumerate(prompts)]
    together = outputs(driver, jobs, budget=2048, seed=1)
    assert outputs(driver, jobs, budget=16, seed=2) == together
    assert [outputs(driver, [job], budget=2048, seed=3)[0] for job in jobs] == together
    assert len({tuple(output) for output in together}) == len(jobs)


@pytest.mark.parametrize("place", [0, 20, 39])
def test_every_token_of_the_prefix_counts(driver: Driver, place: int) -> None:
    """A prompt that differs in one token goes on differently."""
    prompt = list(range(40))
    other = [*prompt[:place], 300, *prompt[place + 1 :]]
    first, second = outputs(driver, [(prompt, {}), (other, {})], budget=2048, seed=1)
    assert first != second


def test_what_the_cache_holds_counts(driver: Driver) -> None:
    """Two blocks that change places change the text: a mistake of the scheduler's would show."""
    prompt = list(range(40))
    (right,) = outputs(driver, [(prompt, {})], budget=2048, seed=1)
    scheduler = driver.scheduler(seed=1)
    sequence = scheduler.add(prompt, 20)
    plan = scheduler.plan()
    assert plan is not None
    driver.engine.submit(plan, driver.epoch)
    scheduler.process(driver.result())
    cache = driver.engine._loaded.runner.kv_cache
    with torch.inference_mode():
        cache[sequence.blocks[:2]] = cache[sequence.blocks[1::-1]]
    driver.drive(scheduler)
    assert sequence.output[0] == right[0]
    assert sequence.output != right
