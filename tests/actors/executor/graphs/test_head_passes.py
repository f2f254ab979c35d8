"""Graphs of a draft head's passes: what is captured, and what is launched while it is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch

from pagebus.actors.executor.batch.buckets import Bucket, Buckets, decode_sizes
from pagebus.actors.executor.graphs.graphs import Graphs
from pagebus.actors.executor.graphs.head_passes import Follow, Guess, HeadPass, covering_guesses, head_passes

BUCKETS = Buckets(256, 512, 64, largest_pieces=4000, max_verified=320)


class CapturedGraph(torch.cuda.CUDAGraph):
    """One of nothing, which counts its launches. There is no GPU here."""

    def __new__(cls) -> CapturedGraph:
        return cast("CapturedGraph", object.__new__(cls))

    def __init__(self) -> None:
        self.launches = 0

    def replay(self) -> None:
        self.launches += 1


def test_what_is_captured() -> None:
    """Guesses for as many rows as decodes have, and what follows each graph of a whole step; none without a head."""
    passes = head_passes(BUCKETS)

    assert [each.rows for each in passes if isinstance(each, Guess)] == decode_sizes(256)[::-1]
    whole = [each for each in (*BUCKETS.first(), *BUCKETS.later()) if not each.pieces]
    assert {each for each in passes if isinstance(each, Follow)} == {Follow(each.rows, each.tokens) for each in whole}
    assert [each.rows for each in covering_guesses(BUCKETS)] == [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert Graphs(BUCKETS, passes=passes).progress[1] == Graphs(BUCKETS).progress[1] + len(passes)
    assert head_passes(BUCKETS, follows=False) == [each for each in passes if isinstance(each, Guess)]


def test_guesses_take_the_next_larger_graph_while_their_own_is_missing() -> None:
    """It is asked for once. Without any they are padded to it all the same, and launched kernel by kernel."""
    graphs, larger = Graphs(BUCKETS, passes=head_passes(BUCKETS)), CapturedGraph()

    assert graphs.guess(3) == Guess(4)
    assert not graphs.run_head(Guess(4))
    graphs._captured[Guess(16)] = larger
    assert graphs.guess(3) == graphs.guess(4) == Guess(16)
    assert graphs.run_head(Guess(16))
    assert larger.launches == 1
    assert graphs.guess(257) is None
    assert graphs._missed.get() == Guess(4)
    assert graphs._missed.empty()


def test_they_are_captured_beside_the_steps() -> None:
    """First those that a step has missed. What cannot be captured is launched kernel by kernel, and not tried again."""
    tried: list[HeadPass] = []

    class Head:
        def run(self, wanted: HeadPass) -> None:
            tried.append(wanted)
            if wanted == Guess(8):
                raise RuntimeError("it waits for the device")

    class StepsCaptured(Graphs):
        """Captures no steps."""

        def _capture(self, runner: Any, bucket: Bucket) -> None:
            self._captured[bucket] = None

        @contextmanager
        def _capturing(self, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
            yield CapturedGraph()

    graphs, missed = StepsCaptured(BUCKETS, passes=head_passes(BUCKETS)), Follow(256, 288)
    passes = head_passes(BUCKETS)
    assert not graphs.run_head(missed)

    def captured(began_s: float) -> None:
        if set(passes) <= graphs._captured.keys():
            graphs.close()

    runner = SimpleNamespace(kv_cache=torch.empty(0, device="meta"), head=Head())
    graphs.capture_missing(cast("Any", runner), captured)
    assert tried == [missed, *(each for each in passes if each != missed)]
    assert {each for each in passes if not graphs.run_head(each)} == {Guess(8)}
    assert graphs.guess(8) == Guess(16)
