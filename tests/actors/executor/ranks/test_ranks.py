"""Engines of ranks, together: transformers' tokens, equal residuals, equal samples; when one is lost, all end."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.loading.kv_scales import calculate_scales
from pagebus.actors.executor.models.decoder import as_decoder
from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.model.family import Family
from pagebus.bus.messages import StepResult
from tests.actors.executor.models.test_families import SETTINGS, prompts_for, reference_tokens
from tests.actors.executor.sampling.test_grammars import LETTERS, PROMPT, SHIPPED, constrained
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden, make_model
from tests.helpers.oracle import make_oracle
from tests.helpers.ranks.rank_driver import RankDriver, meeting

pytestmark = pytest.mark.share(6)

SMALL = SETTINGS | {"threads": 1}
GOLDEN = [(family, next(iter(family.golden))) for family in FAMILIES]
"""A model of each family."""
FOUR = ("qwen2", "gpt-oss", "olmo2", "internlm2", "granite-shared", "deepseek-v2")
"""Families that ranks divide in ways of their own: biases, sinks and experts by turns, norms over width, fused by
head, shared experts, latents. All have fewer heads of keys than four."""
COUNT = 12


class Recorded(Comm):
    """Passes everything on, and writes down every exchange: what it was, and a digest of its result."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm
        self.calls: list[tuple[tuple[int, ...], str, int]] = []

    def connect(self) -> None:
        self._comm.connect()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = self._comm.all_gather(x)
        self.calls.append((tuple(x.shape), str(x.dtype), zlib.crc32(gathered.view(torch.uint8).numpy().tobytes())))
        return gathered

    def close(self) -> None:
        self._comm.close()


def answers(driver: Driver, prompts: list[list[int]], budget: int = 64, **params: Any) -> list[list[int]]:
    """Of all prompts beside each other."""
    scheduler = driver.scheduler(budget)
    sequences = [scheduler.add(prompt, COUNT, **params) for prompt in prompts]
    driver.drive(scheduler)
    return [sequence.output for sequence in sequences]


def check_family(family: Family, name: str, world: int, folder: Path) -> None:
    make_golden(folder, family.model_type, family.golden[name])
    prompts = prompts_for(family, name)[1:]
    expected = reference_tokens(folder, prompts, COUNT)
    assert all(len(answer) == COUNT for answer in expected)
    driver = RankDriver(folder, world, **SMALL)
    got = answers(driver, prompts)
    driver.close()
    assert [output[: len(known)] for output, known in zip(got, expected, strict=True)] == expected


@pytest.mark.parametrize(("family", "name"), GOLDEN, ids=[name for _, name in GOLDEN])
def test_two_ranks_give_the_tokens_of_transformers(family: Family, name: str, tmp_path: Path) -> None:
    check_family(family, name, 2, tmp_path)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    check_family(next(family for family in FAMILIES if name in family.golden), name, 4, tmp_path)


@pytest.mark.parametrize(("world", "dtype"), [(2, "float32"), (2, "bfloat16"), (4, "float32")])
def test_ranks_exchange_the_same_in_the_same_order(world: int, dtype: str, tmp_path: Path) -> None:
    """Every sum has the same bits on all ranks, so the residual stream has; and so have the logits."""
    folder = make_model(tmp_path, "qwen2", seed=5, num_attention_heads=4, num_key_value_heads=2)
    comms = [Recorded(comm) for comm in meeting(world)]
    driver = RankDriver(folder, world, list(comms), **SMALL | {"dtype": dtype})
    prompts = [[1], list(range(2, 90)), list(range(40))]
    answers(driver, prompts, temperature=1.0, top_p=0.9, seed=7)
    driver.close()
    first = comms[0].calls
    assert len(first) > 100
    for comm in comms[1:]:
        assert comm.calls == first


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.3, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 6, "logprobs": 3},
]


def test_ranks_sample_what_one_rank_samples(tmp_path: Path) -> None:
    """The noise depends on seed, index and token alone, and the logits on the ranks by their rounding alone."""
    folder = make_model(tmp_path, "qwen3", seed=6, num_attention_heads=4, num_key_value_heads=2)
    prompts = [[1], list(range(2, 90)), list(range(40))]
    one, two = Driver(folder, **SMALL), RankDriver(folder, 2, **SMALL)
    for params in SAMPLED:
        assert answers(two, prompts, **params) == answers(one, prompts, **params)
    one.close()
    two.close()


def test_ranks_keep_to_grammars_masks_and_lists() -> None:
    """Each bans the tokens of its part. The shipped model: a grammar needs a tokenizer."""
    wanted: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 3, **constrained(**LETTERS)},
        {"temperature": 1.0, "seed": 4, "allowed_token_ids": (7, 300, 2047, 2048, 2049, 4000)},
        {"temperature": 0.8, "seed": 5, "bad_words_token_ids": ((100,), (5, 3000)), "logit_bias": {2500: 9.0, 9: 8.0}},
    ]
    told = []
    for made in (Driver, RankDriver):
        driver = made(SHIPPED, *((2,) if made is RankDriver else ()), **SMALL)
        scheduler = driver.scheduler(64)
        sequences = [scheduler.add(PROMPT, COUNT, **params) for params in wanted]
        driver.drive(scheduler)
        driver.close()
        told.append([sequence.output for sequence in sequences])
    assert told[0] == told[1]
    assert set(told[1][1]) <= {7, 300, 2047, 2048, 2049, 4000}


def test_logprobs_are_those_of_one_rank(tmp_path: Path) -> None:
    """Of sampled tokens and of prompts, which are computed in pieces."""
    folder = make_model(tmp_path, "llama3", seed=7, num_attention_heads=4, num_key_value_heads=2)
    told: list[list[StepResult]] = []
    for driver in (Driver(folder, **SMALL), RankDriver(folder, 2, **SMALL)):
        results: list[StepResult] = []
        scheduler = driver.scheduler(64)
        scheduler.add(list(range(80)), 8, logprobs=2, prompt_logprobs=2)
        driver.drive(scheduler, on_result=results.append)
        driver.close()
        told.append(results)
    for one, two in zip(*told, strict=True):
        for bits in ("logprob_bits", "prompt_bits"):
            told_by = [getattr(result, bits).view(np.float32) for result in (one, two)]
            np.testing.assert_allclose(*told_by, atol=1e-4)
        assert two.prompt_ranks.tolist() == one.prompt_ranks.tolist()
    assert sum(len(result.logprob_bits) for result in told[1]) == 8
    assert sum(len(result.prompt_bits) for result in told[1]) == 79


def test_a_step_that_samples_nothing(tmp_path: Path) -> None:
    """A prompt alone, in chunks: the last layer of all but the last has no tokens."""
    folder = make_model(tmp_path, "llama2", seed=5, num_attention_heads=4, num_key_value_heads=2)
    one, two = Driver(folder, **SMALL), RankDriver(folder, 2, **SMALL)
    assert answers(two, [list(range(100))], 24) == answers(one, [list(range(100))], 24)
    one.close()
    two.close()


def test_the_cache_of_a_rank_has_its_heads_alone(tmp_path: Path) -> None:
    """And a group has as many blocks as its smallest rank."""
    folder = make_model(tmp_path, "llama3", seed=8, hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    memory = SMALL | {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20}
    one, two = Driver(folder, **memory), RankDriver(folder, 2, **memory)
    block = one.info.block_bytes
    assert two.info.block_bytes == block * 2 // 3  # of the rank with two heads
    assert two.info.num_blocks == (1 << 20) // (block * 2 // 3)
    assert [engine._loaded.batch.limits.num_blocks for engine in two.engines] == [two.info.num_blocks] * 2
    one.close()
    two.close()


def test_scales_of_a_float8_cache_are_those_of_the_whole(tmp_path: Path) -> None:
    """Each rank has those of its heads."""
    folder = make_model(tmp_path, "llama3", seed=9, num_attention_heads=4, num_key_value_heads=2)
    float8 = SMALL | {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    one, two = Driver(folder, **float8), RankDriver(folder, 2, **float8)
    whole = calculate_scales(one.engine._loaded.runner.model)
    own = [
        torch.stack([layer.attention.kv_scales for layer in as_decoder(engine._loaded.runner.model).layers])
        for engine in two.engines
    ]
    torch.testing.assert_close(torch.cat(own, dim=2), whole)
    one.close()
    two.close()


def test_a_lost_rank_ends_the_others(tmp_path: Path) -> None:
    """Who waits for it in an exchange hears of it at once, by its number."""
    folder = make_model(tmp_path, "llama2", seed=11, num_attention_heads=4, num_key_value_heads=2)
    driver = RankDriver(folder, 2, **SMALL)
    assert driver.engines[1].stop()
    scheduler = driver.scheduler(64)
    scheduler.add(list(range(20)), 8)
    plan = scheduler.plan()
    assert plan is not None
    driver.engines[0].submit(plan, 1)
    with pytest.raises(EngineError, match="rank 0 of 2 has lost another rank"):
        driver.result()
    assert driver.engines[0].stop()


def test_the_oracle_has_ranks_too(tmp_path: Path) -> None:
    """Each makes the logits of its part of the vocabulary, so that tests of groups see mixed-up ranks."""
    folder = make_oracle(tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "max_num_seqs": 8, "swap_space": 0}
    settings["num_gpu_blocks_override"] = 80
    prompts = [[1], list(range(2, 90)), list(range(40))]
    one, two = Driver(folder, **settings), RankDriver(folder, 2, **settings)
    assert answers(two, prompts) == answers(one, prompts)
    one.close()
    two.close()
