"""Ranks pad their steps alike, whichever graphs each of them has: what they exchange follows from the plans alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebus.actors.executor.batch import buckets as buckets_module
from pagebus.actors.executor.batch.buckets import Bucket, Buckets
from pagebus.actors.executor.graphs.graphs import Graphs, Wanted, _Captured, padded_pass
from pagebus.actors.executor.graphs.head_passes import HeadPass
from pagebus.actors.executor.graphs.piecewise_graphs import LaunchedPieces, Pieces, PiecewiseGraphs
from pagebus.actors.executor.graphs.resampling import Resampling
from pagebus.actors.executor.loading import limits
from pagebus.actors.executor.step.runner import Runner
from pagebus.actors.settings import Settings
from tests.actors.executor.eager_graphs import computed_pieces, pad_steps
from tests.actors.executor.ranks.test_ranks import SMALL, answers
from tests.actors.executor.ranks.test_sameness import REQUEST
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_model
from tests.helpers.ranks.rank_driver import RankDriver
from tests.helpers.ranks.thread_comm import ThreadComm, thread_comms, together

pytestmark = pytest.mark.share(6)

Ranks = tuple[RankDriver, list[ThreadComm], list["SomeGraphs"]]


class SomeGraphs(Graphs):
    """Has the graph of what it misses at once, sooner or later, or never. A replay computes what was captured."""

    def __init__(self, buckets: Buckets, runner: Runner, seed: int) -> None:
        super().__init__(buckets, alike=True)
        self._runner, self._random = runner, random.Random(seed)
        self.replays, self.in_pieces = 0, {PiecewiseGraphs: 0, LaunchedPieces: 0}

    def _ask(self, wanted: Wanted) -> None:
        if self._random.random() < 0.4:
            in_pieces = isinstance(wanted, Bucket) and wanted.pieces
            self._captured[wanted] = computed_pieces(self._runner, wanted.tokens) if in_pieces else self._made(wanted)

    def pieces(self, bucket: Bucket) -> Pieces:
        """Which are few, so that they are lost again."""
        found = super().pieces(bucket)
        self.in_pieces[type(found)] += 1
        if self._random.random() < 0.4:
            self._captured.pop(bucket, None)
        return found

    def run_head(self, wanted: HeadPass) -> bool:
        assert self._runner.head is not None
        if wanted not in self._captured:
            self._ask(wanted)
            return False
        self._runner.head.run(wanted)
        return True

    def can_verify(self) -> bool:
        return True

    def _made(self, wanted: Wanted) -> _Captured:
        made = _Captured(cast("torch.cuda.CUDAGraph", None), torch.empty(0), torch.empty(0), torch.empty(0))
        runner = self._runner

        def replay() -> None:
            self.replays += 1
            if isinstance(wanted, Resampling):
                logits = cast("_Captured", self._captured[wanted.bucket]).logits
                made.sampled = runner.sample_with_extras(wanted.extras, logits, any_random=True)
            else:
                made.hidden, made.logits, made.sampled = padded_pass(runner, cast("Any", wanted))

        made.graph = cast("torch.cuda.CUDAGraph", SimpleNamespace(replay=cast("Callable[[], None]", replay)))
        return made


@pytest.fixture(scope="module", params=["whole", "pieces"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Graphs hold whole steps of up to 40 tokens, or of up to 16 and the pieces of those of 17 to 64."""
    folder = make_model(tmp_path_factory.mktemp("m"), "qwen2", seed=5, num_attention_heads=4, num_key_value_heads=2)
    comms = thread_comms(2)
    driver = RankDriver(folder, 2, list(comms), **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        if in_pieces := request.param == "pieces":
            patch.setattr(buckets_module, "LONG_QUERY", 17)
        found = []
        for rank, engine in enumerate(driver.engines):
            runner = engine._loaded.runner
            buckets = Buckets(8, 16, 4, largest_pieces=64) if in_pieces else Buckets(8, 40, 4)
            found.append(SomeGraphs(buckets, runner, rank))
            pad_steps(runner, patch, buckets, found[-1])
            engine._agreement.use(runner.uploader.header.agreed)
        yield driver, comms, found
        driver.close()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(REQUEST, min_size=1, max_size=5), st.integers(9, 60))
def test_exchanges_do_not_depend_on_what_is_captured(ranks: Ranks, requests: list[Any], budget: int) -> None:
    driver, comms, _ = ranks
    scheduler, start = driver.scheduler(budget), len(comms[0].calls)
    added = [scheduler.add(range(length), count, seed=seed, **params) for length, count, params, seed in requests]
    driver.drive(scheduler)
    assert all(len(each.output) == count for each, (_, count, _, _) in zip(added, requests, strict=True))
    first, second = (comm.calls[start:] for comm in comms)
    assert len(first) >= 3 * scheduler.step
    assert first == second


def test_pieces_exchange_the_same_with_graphs_and_without(ranks: Ranks) -> None:
    """Prompts in chunks beside decodes, each rank with other graphs of them."""
    driver, comms, graphs = ranks
    if not graphs[0].buckets.largest_pieces():
        pytest.skip("there are none")
    scheduler, start = driver.scheduler(40), len(comms[0].calls)
    for length in range(30, 60, 2):
        scheduler.add(range(length), 4)
    driver.drive(scheduler)
    assert comms[0].calls[start:] == comms[1].calls[start:]
    assert all(count for each in graphs for count in each.in_pieces.values())


@pytest.mark.parametrize(("captured_bytes", "most"), [(math.inf, 5000), (1 << 24, 4096), (0, 0)])
def test_ranks_agree_on_the_largest_pieces(captured_bytes: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rank with the most weights would run in pieces, and whose sums may be captured."""
    monkeypatch.setattr(limits, "pieces_tokens", lambda settings, *_: 5000 + settings.rank)

    def agreed(comm: ThreadComm) -> int:
        comm.captured_bytes = captured_bytes
        settings = Settings(rank=comm.rank, tensor_parallel_size=2, actor_name="x")
        return limits.agreed_pieces(settings, cast("Any", None), torch.device("meta"), 4096, comm)

    assert together(2, agreed) == [most, most]


def test_padded_ranks_sample_what_one_rank_samples(ranks: Ranks, tmp_path: Any) -> None:
    """And both have run from graphs, but not from the same ones."""
    driver, _, graphs = ranks
    folder = make_model(tmp_path, "qwen2", seed=5, num_attention_heads=4, num_key_value_heads=2)
    one = Driver(folder, **SMALL)
    prompts = [[1], list(range(2, 30)), list(range(40))]
    for params in ({"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 4, "top_k": 20, "top_p": 0.8}):
        assert answers(driver, prompts, **params) == answers(one, prompts, **params)
    one.close()
    assert all(each.replays for each in graphs)
    assert graphs[0]._captured.keys() != graphs[1]._captured.keys()
