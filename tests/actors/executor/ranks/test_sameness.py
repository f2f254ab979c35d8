"""What ranks exchange follows from the plans alone: for any schedule all make the same exchanges in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.sharded.sums import with_sums
from pagebus.kernels.layers.norm import rms_norm_reference
from tests.actors.executor.ranks.test_ranks import SMALL
from tests.helpers.engine_driver import Grown
from tests.helpers.model_factory import make_model
from tests.helpers.ranks.rank_driver import RankDriver
from tests.helpers.ranks.thread_comm import ThreadComm, thread_comms, together

Ranks = tuple[RankDriver, list[ThreadComm]]
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.2, "top_p": 0.99, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {3: 2.0}},
    {"allowed_token_ids": (5, 6, 200), "bad_words_token_ids": ((5, 6), (200,))},
    {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1},
    {"logprobs": 1, "logprob_token_ids": (4, 90)},
]
REQUEST = st.tuples(st.integers(1, 50), st.integers(1, 5), st.sampled_from(PARAMS), st.integers(0, 9))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = make_model(tmp_path_factory.mktemp("m"), "qwen2", seed=5, num_attention_heads=4, num_key_value_heads=2)
    comms = thread_comms(2)
    driver = RankDriver(folder, 2, list(comms), **SMALL)
    yield driver, comms
    driver.close()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(REQUEST, min_size=1, max_size=5), st.integers(9, 60))
def test_exchanges_follow_from_the_plans(ranks: Ranks, requests: list[Any], budget: int) -> None:
    """Prompts in pieces, decodes beside them, rows with and without limits, steps that sample nothing."""
    driver, comms = ranks
    scheduler, start = driver.scheduler(budget), len(comms[0].calls)
    added: list[Grown] = [
        scheduler.add(range(length), count, seed=seed, **params) for length, count, params, seed in requests
    ]
    driver.drive(scheduler)
    assert all(len(each.output) == count for each, (_, count, _, _) in zip(added, requests, strict=True))
    first, second = (comm.calls[start:] for comm in comms)
    assert len(first) >= 3 * scheduler.step
    assert first == second


def test_the_same_plans_have_the_same_exchanges(ranks: Ranks) -> None:
    """Whatever was computed before: nothing is measured, tuned or remembered that would change them."""
    driver, comms = ranks
    found = []
    for _ in range(2):
        scheduler, start = driver.scheduler(20), len(comms[0].calls)
        for params in PARAMS:
            scheduler.add(range(30), 3, seed=1, **params)
        driver.drive(scheduler)
        found.append(comms[0].calls[start:])
    assert found[0] == found[1]


class WithNorms(ThreadComm):
    """Has norms of sums of its own, which may depend on the number of tokens."""

    def all_reduce_norm(self, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError


def test_invariant_sums_leave_norms_alone() -> None:
    """With ``--deterministic`` a norm behind a sum is the same kernel for any number of tokens."""
    x, residual, weight = torch.randn(3, 2, 5, 8).unbind()

    def normed(comm: ThreadComm) -> torch.Tensor:
        own = WithNorms(comm.rank, comm.size, comm._meeting)
        ops, before = with_sums(Ops.reference(), own, invariant=True), residual[0].clone()
        found = ops.add_rms_norm(x[comm.rank], before, weight[0, 0], 1e-5)
        assert torch.equal(before, residual[0] + (x[0] + x[1]))
        assert isinstance(found, torch.Tensor)
        return found

    expected = rms_norm_reference(residual[0] + (x[0] + x[1]), weight[0, 0], 1e-5)
    assert all(torch.equal(found, expected) for found in together(2, normed))


@pytest.mark.parametrize("what", ["temperature", "token", "adapter"])
def test_settings_tokens_and_adapters_that_differ_end_all(what: str, tmp_path: Any) -> None:
    """Although what is exchanged has the same shapes: at the step, and before a token is told."""
    folder = make_model(tmp_path, "llama2", seed=10, num_attention_heads=4, num_key_value_heads=2)
    driver = RankDriver(folder, 2, list(thread_comms(2)), **SMALL)
    prompts = [list(range(20)), list(range(20))]
    params = [{"temperature": 1.0}, {"temperature": 1.0}]
    if what == "token":
        prompts[1][7] = 90
    elif what == "temperature":
        params[1]["temperature"] = 1.1
    for engine, prompt, own in zip(driver.engines, prompts, params, strict=True):
        scheduler = driver.scheduler(64)
        scheduler.add(prompt, 8, **own)
        plan = scheduler.plan()
        assert plan is not None
        if what == "adapter" and engine is driver.engines[1]:
            plan = replace(plan, dropped_adapters=("5eed" * 8,))
        engine.submit(plan, 1)
    with pytest.raises(EngineError, match=r"drifted apart \(rank 0: step 1, \w+, rank 1: step 1, \w+\)"):
        driver.result()
    driver.close()
