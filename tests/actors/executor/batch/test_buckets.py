"""The shapes that steps are padded to, and which of them have a graph."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagebus.actors.bench.driver.shapes import write_model_folder
from pagebus.actors.executor.batch.buckets import SLOW_SIZES, Bucket, Buckets, decode_sizes, token_sizes
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.runs import Runs
from pagebus.actors.executor.batch.step_work import Extras, StepWork
from pagebus.actors.executor.graphs.graphs import Graphs, _Captured, empty_step, with_adapted
from pagebus.actors.executor.graphs.head_passes import Guess
from pagebus.actors.executor.graphs.resampling import Resampling, resampling_of
from pagebus.actors.executor.loading.limits import (
    MAX_ENCODER_GRAPH_TOKENS,
    decodes_apart,
    graph_tokens,
    pieces_tokens,
)
from pagebus.actors.executor.step.runner import Runner
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings
from tests.actors.model.pooling.tiny_models import make_encoder


def test_decode_buckets_grow_by_eight_and_end_at_the_largest() -> None:
    """1, 2, 4, 8, 16, 24 ...; the largest batch has its own. Above 256 sixteen of them double the size."""
    assert decode_sizes(256) == [1, 2, 4, *range(8, 257, 8)]
    assert decode_sizes(600)[-4:] == [512, 544, 576, 600]
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]


def test_token_buckets_waste_an_eighth_at_most() -> None:
    """From 256 tokens on; below, 32 tokens at most."""
    sizes, quick = token_sizes(2048), SLOW_SIZES.values()

    assert sizes[:8] == [32, 64, 96, 128, 160, 192, 224, 256]
    assert sizes[-1] == 2048
    steps = {after: after - before for before, after in itertools.pairwise(sizes)}
    assert all(step <= max(32, (after - step) // 8) for after, step in steps.items() if after not in quick)
    assert token_sizes(20) == [20]


def test_no_bucket_has_a_size_that_takes_longer_than_the_next() -> None:
    """Unless it is the largest that is wanted. Sizes rise up to that."""
    for sizes in (decode_sizes, token_sizes):
        assert SLOW_SIZES.keys().isdisjoint(sizes(4096))
        for largest in (304, 195, 448, 460):
            assert sizes(largest) == sorted({*sizes(largest)})
            assert sizes(largest)[-1] == largest


def verifying(queries: list[int], num_decodes: int) -> StepWork:
    """A step of rows with so many tokens each, that samples behind all of them."""
    tokens = np.zeros(sum(queries), np.int32)
    work = empty_step()
    work.slots, work.num_decodes, work.num_tokens = np.arange(len(queries), dtype=np.int32), num_decodes, len(tokens)
    work.query_start = np.cumsum([0, *queries]).astype(np.int32)
    work.positions, work.max_query_len, work.max_context_len = tokens, max(queries), 500
    return work


@pytest.mark.parametrize("apart", [True, False])
def test_decodes_with_drafts_are_padded_to_few_tokens(apart: bool) -> None:
    """One row, 32, and 64 of five tokens; with plain decodes beside; and what others than these fit in."""
    buckets = Buckets(256, 2048, 16, max_samples=256, max_verified=320, decodes_apart=apart)
    sizes = {(1, 0): 8, (8, 0): 40, (32, 0): 160, (64, 0): 320, (20, 9): 112}
    for (rows, plain), tokens in sizes.items():
        work = verifying([1] * plain + [5] * rows, plain if apart else 0)
        bucket = buckets.fitting(work)
        assert bucket is not None
        assert (bucket.rows, bucket.tokens) == (tokens, tokens)
        assert bucket in buckets.covering_kernels()
        assert bucket in [*buckets.first(), *buckets.later()]
        for larger in buckets.above(bucket):
            assert larger.spans >= len(work.slots) - work.num_decodes
    assert buckets.fitting(verifying([5] * 100, 0)) is None
    prompt = verifying([5, 40], 0)
    prompt.positions = np.zeros(6, np.int32)
    assert buckets.fitting(prompt) == Buckets(256, 2048, 16, decodes_apart=apart).fitting(prompt)


def test_drafts_fit_beside_prompts_and_a_full_batch() -> None:
    """254 decodes, of which some verify four drafts, and a prompt sample more tokens than there are sequences. From the
    start a graph holds them, of at most twice the tokens; plain steps are padded as without drafts."""
    limits = BatchLimits(256, 4096, 2048, 16, 1000, 5000, num_drafts=4)
    buckets = Buckets(256, 1024, 64, max_samples=limits.padded_samples, max_verified=limits.verified_tokens)
    plain = Buckets(256, 1024, 64)
    for drafting in (1, 8, 13, 40, 60):
        for prompt in (9, 100, 300):
            work = verifying([1] * (254 - drafting) + [5] * drafting + [prompt], 254 - drafting)
            work.positions = work.positions[: 254 + 4 * drafting + 1]
            bucket = buckets.fitting(work)
            assert bucket is not None
            assert bucket.rows == (320 if 255 + 4 * drafting <= 320 else 512)
            assert bucket.tokens < 1.15 * max(work.num_tokens, bucket.rows)
            found = [each for each in buckets.first() if each in [bucket, *buckets.above(bucket)]]
            assert min(each.tokens for each in found) <= 2 * bucket.tokens
    for work in (rows_of(*[1] * 255, 40, num_decodes=255), rows_of(300)):
        assert buckets.fitting(work) == plain.fitting(work)
    for each in plain.later():
        assert each in [*buckets.later(), *buckets.first()]


def test_large_models_have_graphs_of_fewer_tokens(tmp_path: Path) -> None:
    """Larger steps compute for as long as they take to launch; decodes of all slots always have one."""

    def tokens(name: str, **settings: Any) -> tuple[int, int]:
        config = ModelConfig.load(write_model_folder(name, tmp_path))
        arguments = Settings(model=name, **settings), config, torch.device("cuda")
        return graph_tokens(*arguments, torch.bfloat16), pieces_tokens(*arguments)

    whole, pieces = tokens("qwen06b")
    assert (whole, pieces > 8192) == (4096, True)
    whole, pieces = tokens("llama8b")
    assert 1024 < whole == pieces < 2048
    assert tokens("llama8b", max_num_seqs=3000) == (3000, pieces)
    assert tokens("llama8b", max_cudagraph_capture_size=1000) == (1000, 0)
    assert tokens("llama8b", enforce_eager=True) == (0, 0)
    assert tokens("qwen06b", deterministic=True) == (4096, 0)


def test_graphs_of_encoders_are_small(tmp_path: Path) -> None:
    """And there are none in float32, nor in pieces. One serves rows of any lengths, of one token too."""
    config = ModelConfig.load(make_encoder(tmp_path, "xlm-roberta"))

    def tokens(dtype: torch.dtype, **settings: Any) -> int:
        return graph_tokens(Settings(model="x", **settings), config, torch.device("cuda"), dtype)

    assert not decodes_apart(Settings(model="x"), config)
    assert pieces_tokens(Settings(model="x"), config, torch.device("cuda")) == 0
    assert tokens(torch.bfloat16) == tokens(torch.float16) == MAX_ENCODER_GRAPH_TOKENS
    assert tokens(torch.float32) == tokens(torch.bfloat16, enforce_eager=True) == 0
    assert tokens(torch.bfloat16, max_cudagraph_capture_size=64) == 64
    buckets = Buckets(256, MAX_ENCODER_GRAPH_TOKENS, 64, decodes_apart=False)
    for lengths in ([1], [1] * 256, [2] * 256, [512], [1, 511], [300, 1, 1]):
        bucket = buckets.fitting(rows_of(*lengths))
        assert bucket is not None
        assert bucket.rows >= len(lengths)
        assert sum(lengths) <= bucket.tokens
        assert any(
            bucket in (first, *buckets.above(bucket)) or first in buckets.above(bucket) for first in buckets.first()
        )


def rows_of(*lengths: int, num_decodes: int = 0) -> StepWork:
    """A step whose rows compute so many tokens each."""
    return dataclasses.replace(
        empty_step(), num_decodes=num_decodes, num_tokens=sum(lengths), max_query_len=max(lengths),
        slots=np.arange(len(lengths), dtype=np.int32), query_start=np.cumsum([0, *lengths], dtype=np.int32),
    )  # fmt: skip


def test_a_bucket_is_the_smallest_that_holds_the_step() -> None:
    """Steps above the largest have none, decodes have their own."""
    buckets = Buckets(20, 512, 64)

    assert [buckets.fitting(rows_of(*[1] * rows, num_decodes=rows)) for rows in (1, 3, 9, 17, 20)] == [
        Bucket(1, 1), Bucket(4, 4), Bucket(16, 16), Bucket(20, 20), Bucket(20, 20)
    ]  # fmt: skip
    assert buckets.fitting(rows_of(1)) == Bucket(16, 32, 33)
    assert buckets.fitting(rows_of(*[1] * 16, 17, num_decodes=16)) == Bucket(20, 64, 33)
    assert buckets.fitting(rows_of(1, 500)) == Bucket(16, 512, 40)
    assert buckets.fitting(rows_of(13, 500)) is None
    assert buckets.fitting(empty_step()) is None
    assert buckets.first() == [
        *(Bucket(20, 2**n, 32 + max(1, 2**n // 64)) for n in (9, 8, 7, 6, 5)), Bucket(20, 20), Bucket(2, 2)
    ]  # fmt: skip
    assert {each.rows for each in buckets.covering_kernels() if not each.spans} == {20, 16, 8, 4, 2, 1}
    assert [each for each in buckets.later() if each.rows == 20][:2] == [Bucket(20, 96, 34), Bucket(20, 160, 35)]
    assert Bucket(16, 512, 40) in buckets.later()


def test_decodes_that_are_not_apart_have_a_block_of_queries_each() -> None:
    """In the buckets that prompts have; the first few hold every step, and few rows have a small one."""
    buckets = Buckets(256, 512, 16, decodes_apart=False)

    assert [buckets.fitting(rows_of(*[1] * rows)) for rows in (1, 32, 33, 256)] == [
        Bucket(16, 32, 18), Bucket(64, 64, 68), Bucket(64, 64, 68), Bucket(256, 256, 272)
    ]  # fmt: skip
    assert buckets.fitting(rows_of(*[1] * 255, 257)) == Bucket(256, 512, 288)
    assert buckets.fitting(empty_step()) is None
    assert buckets.first() == [
        Bucket(256, 512, 288), Bucket(256, 256, 272), Bucket(128, 128, 136), Bucket(64, 64, 68), Bucket(16, 32, 18)
    ]  # fmt: skip
    assert len({*buckets.first(), *buckets.later()}) == len(buckets.first()) + len(buckets.later())


@pytest.mark.parametrize(("max_num_seqs", "largest"), [(512, 4096), (512, 512), (256, 428), (20, 512), (7, 40)])
def test_the_first_graphs_at_most_double_a_step_with_prompts(max_num_seqs: int, largest: int) -> None:
    """However few tokens it has: right after a start it runs from one that is not much larger than its own."""
    buckets = Buckets(max_num_seqs, largest, 64)
    captured = set(buckets.first())
    for tokens in range(2, largest + 1, 13):
        for rows in {1, min(tokens - 1, max_num_seqs)}:
            own = buckets.fitting(rows_of(*[1] * (rows - 1), tokens - rows + 1, num_decodes=rows - 1))
            assert own is not None
            first = next(each for each in [own, *buckets.above(own)] if each in captured)
            assert first.tokens <= 2 * own.tokens


def test_a_step_takes_the_next_larger_graph_while_its_own_is_missing() -> None:
    """With prompts or without; what is missing is asked for once."""
    buckets = Buckets(256, 512, 64)
    graphs = Graphs(buckets)
    decodes, mixed = rows_of(*[1] * 70, num_decodes=70), rows_of(1, 100, num_decodes=1)

    def chosen(work: StepWork, *captured: Bucket) -> Bucket | None:
        graphs._captured = dict.fromkeys(captured)  # type: ignore[assignment]
        return graphs.bucket(work)

    assert chosen(decodes, Bucket(64, 64), Bucket(256, 256), Bucket(128, 128)) == Bucket(128, 128)
    assert chosen(decodes, Bucket(72, 72), Bucket(128, 128)) == Bucket(72, 72)
    assert chosen(mixed, *buckets.first()) == Bucket(128, 128, 128)
    assert chosen(mixed, *buckets.first(), Bucket(64, 128, 34)) == Bucket(64, 128, 34)
    assert chosen(rows_of(600), *buckets.first()) is None
    assert [graphs._missed.get(), graphs._missed.get()] == [Bucket(72, 72), Bucket(16, 128, 34)]
    assert graphs._missed.empty()


def test_drafts_wait_for_all_graphs_that_verify_them() -> None:
    """These are asked for one by one, and only when some would be offered."""
    buckets = Buckets(64, 256, 64, max_samples=64, max_verified=24)
    graphs = Graphs(buckets, adapters=True, passes=[Guess(8)])
    wanted = [*with_adapted(buckets.verified, adapters=True), Guess(8)]
    assert len(wanted) == 7
    graphs._captured = dict.fromkeys(buckets.first())  # type: ignore[assignment]
    assert graphs._missed.empty()
    for each in wanted:
        assert not graphs.can_verify()
        assert not graphs.can_verify()
        assert graphs._missed.get() == each
        assert graphs._missed.empty()
        graphs._captured[each] = None
    assert graphs.can_verify()
    assert Graphs(Buckets(64, 256, 64)).can_verify()


@pytest.mark.parametrize("width", [1, 3])
def test_drafts_are_not_offered_before_they_can_be_verified(width: int) -> None:
    """Whatever the device has found; it is asked only then."""
    calls: list[bool] = []

    def answers(answer: bool) -> Callable[[], bool]:
        return lambda: calls.append(answer) or answer  # type: ignore[func-returns-value]

    def offered(found: int, answer: bool) -> list[int]:
        starts = np.array([0, width, 2 * width], np.int32)
        runs = Runs(starts, np.full(2, 9, np.int32), np.zeros(2, np.int32), can_verify=answers(answer))
        return list(runs.read(np.array([1, 1, 4, 5, 0, found], np.int32)).num_drafts)

    assert offered(0, answer=False) == [0] * 2 * width
    assert not calls
    assert offered(4, answer=False) == [0] * 2 * width
    assert offered(4, answer=True) == [0] * width + [4] * width
    assert calls == [False, True]


class CountingGraphs(Graphs):
    """Notes what it is to capture."""

    def _capture(self, runner: Runner, bucket: Bucket) -> None:
        assert bucket not in self._captured
        self._captured[bucket] = cast("Any", None)


def test_missing_graphs_are_captured_until_told_otherwise() -> None:
    """None twice; one that a step misses goes before those that wait."""
    buckets = Buckets(256, 512, 64)
    missed = [Bucket(16, 128, 34), Bucket(64, 128, 34)]
    graphs = CountingGraphs(buckets)
    wanted = {*buckets.later(), *missed}
    graphs._missed.put(missed[0])

    def captured(began_s: float) -> None:
        if len(graphs._captured) == 3:
            graphs._missed.put(missed[1])
        if len(graphs._captured) == len(wanted):
            graphs.close()

    runner = SimpleNamespace(kv_cache=torch.empty(0, device="meta"))
    graphs.capture_missing(cast("Any", runner), captured)

    order = list(graphs._captured)
    assert [order[0], order[3]] == missed
    assert set(order) == wanted


def test_how_many_graphs_are_captured() -> None:
    """Of those planned; one that a step misses besides is planned from then on."""
    buckets = Buckets(256, 512, 64)
    graphs, planned = CountingGraphs(buckets), len(buckets.first()) + len(buckets.later())
    runner = cast("Any", SimpleNamespace(kv_cache=torch.empty(0, device="meta")))
    seen = [graphs.progress]
    for bucket in buckets.first():
        graphs._capture(runner, bucket)
    seen.append(graphs.progress)
    graphs.bucket(rows_of(*[1] * 40, 60, num_decodes=40))
    seen.append(graphs.progress)
    assert not graphs.complete

    def captured(began_s: float) -> None:
        if graphs.complete:
            graphs.close()

    graphs.capture_missing(runner, captured)
    few = len(buckets.first())
    assert [*seen, graphs.progress] == [(0, planned), (few, planned), (few, planned + 1), (planned + 1, planned + 1)]


def test_sampling_again_is_captured_once_a_step_has_missed_it() -> None:
    """For each bucket and what is asked for, once; where it fails steps do without."""
    graphs = CountingGraphs(Buckets(64, 256, 64))
    wanted, other = Resampling(Bucket(8, 8), Extras(truncated=True), 0), Resampling(Bucket(8, 8), Extras(), 0)
    graphs._captured[wanted.bucket] = cast(
        "Any", _Captured(cast("Any", None), torch.empty(0), torch.empty(0), torch.empty(0))
    )

    assert [graphs.can_resample(each) for each in (wanted, other, wanted)] == [False] * 3
    assert [graphs._missed.get(), graphs._missed.get()] == [wanted, other]
    assert graphs._missed.empty()
    assert not graphs.complete
    graphs._capture_resampling(cast("Any", None), wanted)  # there is no GPU here
    assert not graphs.can_resample(wanted)
    assert graphs._missed.empty()
    graphs._captured[other] = graphs._captured[wanted.bucket]
    assert graphs.can_resample(other)


def test_scores_and_penalties_of_many_rows_are_sampled_without_a_graph() -> None:
    """The first need the logits as they are, the others gigabytes of a graph's own."""
    work, bucket = rows_of(1, num_decodes=1), Bucket(256, 256)

    assert resampling_of(work, bucket, 3, 150_000) == Resampling(bucket, Extras(), 3)
    work.extras = Extras(penalized=True)
    assert resampling_of(work, bucket, 3, 150_000) is None
    assert resampling_of(work, Bucket(64, 64), 3, 150_000) == Resampling(Bucket(64, 64), Extras(penalized=True), 3)
    work.logprob_rows = cast("Any", object())
    assert resampling_of(work, Bucket(64, 64), 3, 150_000) is None


def test_long_chunks_behind_long_contexts_have_no_bucket() -> None:
    """They attend in another launch shape."""
    buckets, long = Buckets(64, 2048, 64), rows_of(1500)

    assert buckets.fitting(long) == Bucket(16, 1536, 56)
    assert buckets.fitting(dataclasses.replace(long, max_context_len=8192)) is None


def test_what_suits_no_other_bucket_goes_in_pieces() -> None:
    """From so many tokens on that launching takes longest: all beyond the largest, and long chunks behind long
    contexts. The largest are captured unasked, and nothing larger stands for one that is missing."""
    buckets = Buckets(64, 2048, 64, largest_pieces=4000)
    long = dataclasses.replace(rows_of(1500), max_context_len=8192)

    assert buckets.fitting(rows_of(1, 2048, num_decodes=1)) == Bucket(0, 2304, pieces=True)
    assert buckets.fitting(rows_of(3900)) == buckets.largest_pieces() == Bucket(0, 4000, pieces=True)
    assert buckets.fitting(rows_of(4001)) is None
    assert buckets.fitting(long) == Bucket(0, 1536, pieces=True)
    assert [each.tokens for each in buckets.later() if each.pieces] == [4000, 3840, 3584, 3328, 3072, 2816, 2560, 2304]
    assert [each for each in buckets.covering_kernels() if each.pieces] == [buckets.largest_pieces()]
    graphs = Graphs(buckets)
    graphs._captured = dict.fromkeys([Bucket(0, 4000, pieces=True)])  # type: ignore[assignment]
    assert graphs.bucket(rows_of(3500)) is None
    assert graphs._missed.get() == Bucket(0, 3584, pieces=True)


@pytest.mark.parametrize(("max_num_seqs", "largest"), [(1, 1), (1, 2048), (3, 2), (100, 64), (256, 2048), (8192, 8192)])
def test_every_bucket_has_a_token_for_each_row(max_num_seqs: int, largest: int) -> None:
    """Whatever the limits, also those that are captured unasked."""
    buckets = Buckets(max_num_seqs, largest, 64)

    every = [*buckets.first(), *buckets.later()]

    assert len(set(every)) == len(every)
    assert all(0 < bucket.rows <= min(bucket.tokens, max_num_seqs) for bucket in every)
    assert all(bucket.tokens <= largest for bucket in every)
