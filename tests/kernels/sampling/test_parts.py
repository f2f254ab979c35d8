"""Sampling from parts of the vocabulary gives the tokens of the whole, by the kernels and by their reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagebus.kernels.sampling import parts
from pagebus.kernels.sampling.parts import Part, Wanted
from pagebus.kernels.sampling.sampling import sample_reference

pytestmark = pytest.mark.share(6)

ROWS = 6
REFERENCE = parts.chunk_scores_reference, parts.part_best_reference, parts.rank_best_reference
KERNELS = parts.chunk_scores, parts.part_best, parts.rank_best


def sampled(
    logits: torch.Tensor, wanted: Wanted, world: int, ways: tuple[Callable[..., torch.Tensor], ...], any_random: bool,
    cuts: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The tokens that ``world`` ranks agree upon."""
    scores, best, winner = ways
    found = [Part(rank, world, logits.shape[1]) for rank in range(world)]
    own = [logits[:, part.own.start : part.own.stop].contiguous() for part in found]
    told = torch.stack(
        [scores(each, part, wanted, any_random=any_random, cuts=cuts) for each, part in zip(own, found, strict=True)]
    )
    each = [best(x, told, part, wanted, any_random=any_random, cuts=cuts) for x, part in zip(own, found, strict=True)]
    return winner(torch.stack(each))


@pytest.mark.parametrize("ways", [REFERENCE, KERNELS], ids=["reference", "kernels"])
@pytest.mark.parametrize(("vocab", "world"), [(7, 2), (70, 4), (1500, 2), (4096, 2), (5000, 3)])
@pytest.mark.parametrize("any_random", [True, False])
def test_ranks_give_the_tokens_of_the_whole(
    ways: tuple[Callable[..., torch.Tensor], ...], vocab: int, world: int, any_random: bool, device: torch.device
) -> None:
    """Also where chunks of noise lie on two ranks or more, and where logits are equal."""
    generator = torch.Generator().manual_seed(vocab + world)
    for scale in (3.0, 0.0):
        logits = (torch.randn(ROWS, vocab, generator=generator) * scale).to(device)
        heat = torch.tensor([0.0, 0.3, 1.0, 1.5, 0.7, 0.0, 1.0], device=device)
        slots = torch.tensor([5, 1, 2, 3, 4, 0], dtype=torch.int32, device=device)
        indexes = torch.arange(ROWS, dtype=torch.int32, device=device) * 3
        seeds = torch.arange(7, device=device) * 977 + vocab
        none = torch.zeros(7, device=device)
        expected = sample_reference(
            logits, slots, heat, none.int(), none, none, seeds, indexes, any_random=any_random, any_truncation=False
        )
        wanted = Wanted(slots, indexes, heat, seeds)
        assert sampled(logits, wanted, world, ways, any_random).tolist() == expected.tolist()


def test_ranks_leave_out_what_is_cut(device: torch.device) -> None:
    """Of random rows alone, though a chunk or a rank has nothing left; what is as large as the cut stays."""
    vocab, kept = 2500, torch.tensor([1, 1, 2, 7, 300, 2499], device=device)
    logits = torch.randn(ROWS, vocab, device=device) * 3
    heat = torch.tensor([0.0, 0.3, 1.0, 1.5, 0.7, 1.0], device=device)
    slots, seeds = torch.arange(ROWS, dtype=torch.int32, device=device), torch.arange(ROWS, device=device) * 977
    cuts = logits.sort(dim=1, descending=True).values.gather(1, kept.unsqueeze(1) - 1).squeeze(1)
    cuts[0] = torch.inf  # which a greedy row does not read
    wanted, none = Wanted(slots, slots, heat, seeds), torch.zeros(ROWS, device=device)
    given = slots, heat, kept.int(), none + 1, none, seeds, slots
    expected = sample_reference(logits, *given, any_random=True, any_truncation=True)
    for ways in (REFERENCE, KERNELS):
        assert sampled(logits, wanted, 3, ways, any_random=True, cuts=cuts).tolist() == expected.tolist()
