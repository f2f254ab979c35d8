"""Steps of encoders, and of decoders that pool means, padded for CUDA graphs: what the graphs hold, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.executor.pooling import encoder_layer
from pagebus.actors.executor.pooling.full_attention import full_attention, takes_any_lengths
from tests.actors.executor.eager_graphs import EagerGraphs, use_eager_graphs
from tests.actors.executor.graphs.pooled_numbers import Prompt, pooled, write_model
from tests.actors.executor.small_engine import SETTINGS
from tests.helpers.engine_driver import Driver

pytestmark = pytest.mark.share(6)

MOST_ROWS, MOST_TOKENS, LONGEST = 6, 48, 40
KINDS = [
    ("bert", "cls"), ("bert", "mean"), ("bert", "classes"), ("xlm-roberta", "mean"), ("xlm-roberta", "classes"),
    ("qwen3", "mean"), ("qwen3", "dense"),
]  # fmt: skip


def with_garbage(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_start: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """Attention that leaves NaN where there is no row, as a kernel may that computes rows only."""
    assert longest >= int(query_start.diff().max())
    found = full_attention(q, k, v, query_start, longest, scale)
    found[int(query_start[-1]) :] = torch.nan
    return found


class Padded:
    """An engine that can run the same prompts with padded steps and without."""

    def __init__(self, driver: Driver, graphs: EagerGraphs, pooling: str) -> None:
        self.driver, self.graphs, self._pooling = driver, graphs, pooling
        self._runner = graphs.runner

    def check(self, steps: list[list[Prompt]]) -> None:
        """Padded steps pool the same numbers."""
        self._runner.graphs = None
        expected = pooled(self.driver, self._pooling, steps)
        self.graphs.replayed.clear()
        self._runner.graphs = self.graphs
        found = pooled(self.driver, self._pooling, steps)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=2e-5, rtol=2e-5)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(kind))
def padded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Padded]:
    folder = tmp_path_factory.mktemp("model")
    pooling = write_model(folder, *request.param)
    given = SETTINGS | {"max_model_len": LONGEST + 2, "max_num_batched_tokens": MOST_TOKENS, "max_num_seqs": MOST_ROWS}
    driver = Driver(folder, **given)
    apart = request.param[0] == "qwen3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_layer, "full_attention", with_garbage)
        graphs = use_eager_graphs(driver, patch, Buckets(MOST_ROWS, MOST_TOKENS, 4, decodes_apart=apart))
        yield Padded(driver, graphs, pooling)
        driver.close()


def rows(*lengths: int) -> list[Prompt]:
    return [[(7 * place + 11 * row) % 290 + 5 for place in range(length)] for row, length in enumerate(lengths)]


def test_padded_steps_pool_the_same(padded: Padded) -> None:
    """One row, several, as many as there are slots, of one token each, and steps that fill their bucket."""
    steps = [rows(3), rows(LONGEST), rows(1), rows(1, 1, 1, 1, 1), rows(17, 1, 9), rows(8, 8, 8, 8, 8, 8)]

    padded.check(steps)

    replayed = padded.graphs.replayed
    assert len(replayed) >= 2
    assert {bucket.tokens for bucket in replayed if bucket.spans} == {32, MOST_TOKENS}


@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=MOST_ROWS).filter(lambda n: sum(n) <= MOST_TOKENS)
)
def test_padding_changes_no_number(padded: Padded, lengths: list[int]) -> None:
    """Of rows of any lengths, and nothing that a step before has left behind."""
    padded.check([rows(*lengths)])

    assert padded.graphs.replayed


@pytest.mark.parametrize(
    ("dtype", "head_dim", "graphs"),
    [(torch.bfloat16, 64, True), (torch.float16, 32, True), (torch.float32, 64, False), (torch.bfloat16, 36, False)],
)
def test_float32_has_no_graphs(dtype: torch.dtype, head_dim: int, graphs: bool) -> None:
    """Nor have heads that the kernel for rows of any lengths does not take: padded rows need numbers from the host."""
    assert takes_any_lengths(dtype, head_dim) is graphs
