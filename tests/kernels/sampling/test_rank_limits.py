"""Limits over parts of the vocabulary: what ranks tell each other gives the thresholds of the whole, bit by bit."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pagebus.kernels.sampling.limits import sampling_cuts
from pagebus.kernels.sampling.rank_limits import RowLimits, rank_cuts, rank_cuts_reference
from pagebus.kernels.sampling.sampling import GREEDY_BELOW
from tests.helpers.waiting import LIMIT_S

ROWS = 10


class Exchange:
    """What ``world`` ranks tell each other, one rank after the other; ``flat`` counts rows whose logits all want."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts, self.flat = parts, 0
        self._there: list[torch.Tensor] = list(parts)
        self._all_there = threading.Barrier(len(parts), timeout=LIMIT_S)

    def gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self._there[rank] = x.clone()
        self._all_there.wait()
        told = torch.stack(self._there)
        self._all_there.wait()
        return told

    def gather_rows(self, rank: int, wanted: torch.Tensor) -> torch.Tensor:
        told = self.gather(rank, wanted)
        assert (told == told[0]).all()
        whole = torch.cat(self.parts, dim=1)
        whole[wanted == 0] = torch.nan
        if rank == 0:
            self.flat += int(wanted.sum())
        return whole


def cuts_of(parts: list[torch.Tensor], limits: RowLimits, vocab: int) -> tuple[list[torch.Tensor], int]:
    """Of all ranks, and how many rows were flat. One computes at a time: the interpreter has one state."""
    exchange, turns = Exchange(parts), threading.Lock()

    def run(rank: int) -> torch.Tensor:
        def gather(x: torch.Tensor) -> torch.Tensor:
            turns.release()
            told = exchange.gather(rank, x)
            turns.acquire()
            return told

        def gather_rows(_: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            turns.release()
            whole = exchange.gather_rows(rank, wanted)
            turns.acquire()
            return whole

        with turns:
            return rank_cuts(parts[rank], limits, vocab, gather, gather_rows)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts)))), exchange.flat


@pytest.mark.parametrize(("vocab", "world", "scale"), [(7, 2, 3.0), (1500, 3, 4.0), (2200, 2, 0.01)])
def test_cuts_are_those_of_the_whole(vocab: int, world: int, scale: float, device: torch.device) -> None:
    """Of rows with every kind of limit and with none; also where logits are nearly equal, banned, or no numbers."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(ROWS, vocab, generator=generator) * scale).to(device)
    logits[3, vocab // 2 :] = -torch.inf
    logits[4, 1] = torch.nan
    logits[9] = -torch.inf
    heat = torch.tensor([1.0, 0.7, 1.3, 0.9, 1.0, 0.0, 1.0, 0.8, 1.0, 1.0], device=device)
    top_k = torch.tensor([0, 20, 0, 5, 0, 3, 0, 900, 0, 4], dtype=torch.int32, device=device)
    top_p = torch.tensor([0.9, 0.8, 1.0, 1.0, 0.999, 0.5, 1.0, 0.95, 0.05, 0.9], device=device)
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.2, 0.0, 0.001, 0.3, 0.1], device=device)
    slots = torch.arange(ROWS, dtype=torch.int32, device=device)
    limits = RowLimits(slots, heat, top_k, top_p, min_p)
    edges = [rank * vocab // world for rank in range(world + 1)]
    parts = [logits[:, start:end].contiguous() for start, end in itertools.pairwise(edges)]
    found, flat = cuts_of(parts, limits, vocab)

    assert all(torch.equal(each, found[0]) for each in found)
    expected = rank_cuts_reference(parts, limits)
    kept = [(logits >= cuts.unsqueeze(1)).sum(1) for cuts in (found[0], expected)]
    assert kept[0].tolist() == kept[1].tolist()
    alone = sampling_cuts(logits, slots, heat, top_k, top_p, min_p, GREEDY_BELOW)
    assert torch.equal(found[0], alone)
    assert flat > 3 if scale < 1 else flat < 3
