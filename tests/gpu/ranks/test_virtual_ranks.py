"""Ranks as streams of one GPU, in one memory, late at random: all that ranks signal to each other, without a link."""

from __future__ import annotations

import random

import pytest
import torch

from pagebus.kernels.exchange.all_reduce import all_reduce, all_reduce_norm, all_reduce_reference
from pagebus.kernels.exchange.choice import Choice
from pagebus.kernels.exchange.gather import gather
from pagebus.kernels.exchange.peers import FAILED, Limits
from tests.kernels.exchange.virtual_ranks import VirtualRanks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FORMS = ("push", "signal", "two_shot", "turns")
"""The last is ``two_shot`` again, in turns and with several rows at a time."""
LIMITS = Limits(push=1 << 18, signal=1 << 18, two_shot=1 << 18, gather=1 << 14)
DTYPES = (torch.bfloat16, torch.float32)


def choice(form: str) -> Choice:
    if form == "turns":
        return Choice(1 << 30, "two_shot", 2, 8, 256, 512, 4)
    return Choice(1 << 30, form, 8, 8, 1024)


def warm(ranks: VirtualRanks) -> None:
    """Compile and load all kernels, which would wait for a kernel that waits for a rank: with waiting off."""
    for peers in ranks.peers:
        peers.state[FAILED] = 1
    for peers in ranks.peers:
        for dtype in DTYPES:
            for numel in (4096, 999):
                x = torch.ones(numel, dtype=dtype, device="cuda")
                for form in FORMS:
                    all_reduce(x, peers, choice(form))
        for numel in (16, 17, 8192, 8193):
            gather(torch.ones(numel, dtype=torch.int32, device="cuda"), peers)
        rows = torch.ones((5, 1024), dtype=torch.bfloat16, device="cuda")
        for form in FORMS:
            all_reduce_norm(rows, rows.clone(), rows[0].clone(), 1e-5, peers, choice=choice(form))
    torch.cuda.synchronize()
    for peers, region in zip(ranks.peers, ranks.regions, strict=True):
        ranks.layout.clear(region)
        peers.state.zero_()
    torch.cuda.synchronize()


@pytest.mark.parametrize("world", [2, 4])
def test_any_order_of_forms(world: int) -> None:
    ranks = VirtualRanks(world, torch.device("cuda"), LIMITS)
    warm(ranks)
    streams, draw = [torch.cuda.Stream() for _ in range(world)], random.Random(3)
    for turn in range(3000):
        form, dtype = draw.choice((*FORMS, "gather")), draw.choice(DTYPES)
        numel = draw.choice((4096, 999, 16, 8192)) if form != "gather" else draw.choice((16, 17, 8192, 8193))
        xs = [torch.randint(-99, 99, (numel,), device="cuda").to(dtype) for _ in range(world)]
        torch.cuda.synchronize()
        outs = []
        for peers, x, stream in zip(ranks.peers, xs, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(draw.randrange(20_000))
                outs.append(
                    gather(x.to(torch.int32), peers) if form == "gather" else all_reduce(x, peers, choice(form))
                )
        torch.cuda.synchronize()
        assert not ranks.notes.any(), f"turn {turn}: {form}: {ranks.notes.tolist()}"
        expected = torch.stack(xs).to(torch.int32) if form == "gather" else all_reduce_reference(xs)
        for out in outs:
            assert torch.equal(out, expected), f"turn {turn}: {form} of {numel} {dtype}"


@pytest.mark.parametrize("world", [2, 4])
def test_long_runs_without_a_look(world: int) -> None:
    """Many calls in a row per rank, which run ahead of each other as far as they can, in graphs."""
    ranks = VirtualRanks(world, torch.device("cuda"), LIMITS)
    warm(ranks)
    streams = [torch.cuda.Stream() for _ in range(world)]
    xs = [torch.randint(-99, 99, (4096,), device="cuda").bfloat16() for _ in range(world)]
    outs = [[torch.empty_like(x) for _ in FORMS] for x in xs]
    graphs = [torch.cuda.CUDAGraph() for _ in range(world)]
    for peers, x, kept, stream, graph in zip(ranks.peers, xs, outs, streams, graphs, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(7):
                for form, out in zip(FORMS, kept, strict=True):
                    all_reduce(x, peers, choice(form), out)
    for _ in range(2000):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert not ranks.notes.any(), ranks.notes.tolist()
    for kept in outs:
        for out in kept:
            assert torch.equal(out, all_reduce_reference(xs))


def test_a_missing_rank_is_named() -> None:
    ranks = VirtualRanks(2, torch.device("cuda"), LIMITS, patience_ns=100_000_000)
    warm(ranks)
    x = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    all_reduce(x, ranks.peers[0], choice("push"))
    torch.cuda.synchronize()
    assert ranks.notes[0, :3].tolist() == [1, 0, 1]
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    for form in FORMS:
        all_reduce(x, ranks.peers[0], choice(form))
    ended.record()
    torch.cuda.synchronize()
    assert started.elapsed_time(ended) < 50
