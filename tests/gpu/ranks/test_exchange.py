"""The exchange between two ranks, on two GPUs where there are two. RANK_REPLAYS=1000000 replays that often."""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.ranks.rank_processes import run_ranks

REPLAYS = int(os.environ.get("RANK_REPLAYS", "100000"))
MODULE = "tests.gpu.ranks.exchange_cases"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run(*arguments: str, limit_s: float = 240.0) -> None:
    codes, texts = run_ranks(MODULE, arguments, limit_s)
    for rank, text in enumerate(texts):
        print(f"--- rank {rank}, exit code {codes[rank]}\n{text[-6000:]}")
    assert codes == [0, 0]


@pytest.mark.parametrize("cases", ["sums", "norms", "large", "gathers,rows,limits,interface"])
def test_results(cases: str) -> None:
    run("--cases", cases)


def test_missing_rank() -> None:
    run("--cases", "missing", "--patience", "1.0")


@needs_two
def test_late_ranks() -> None:
    run("--cases", "late")


@needs_two
def test_replays() -> None:
    """With eager calls in between, each result checked; then as many as RANK_REPLAYS says, three sums each."""
    run("--cases", "replays,bare", "--replays", "20000", "--bare", str(REPLAYS), limit_s=60 + REPLAYS / 10_000)
