"""Parts of blocks of one number of ranks, cut out of those of another."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from pagebus.actors.executor.memory.block_cuts import put
from pagebus.actors.executor.memory.block_parts import HeadRows
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import MoveError
from pagebus.actors.executor.moves.group import Group, cuts_of
from pagebus.actors.model.shards.shard import Shard
from pagebus.actors.model.spec import Gqa
from tests.helpers.engine_driver import ints

ROWS = ((6, 16), (2, 5), (3, 8))
"""Rows and bytes of a head of the parts of a block: numbers, scales, and what guesses."""
HEADS = (8, 8, 4)
SIZES = (1, 2, 3, 4, 8)


def parts_of(rank: int, world: int, heads: tuple[int, ...] = HEADS) -> tuple[HeadRows, ...]:
    """What a rank has of a block; with fewer heads than ranks several have the same."""
    found = []
    for (rows, size), count in zip(ROWS, heads, strict=True):
        own = Shard(rank, world, None).kv_heads(Gqa(8 * count, count, 8, 1.0))  # type: ignore[arg-type]
        found.append(HeadRows(rows, size, own.start, len(own)))
    return tuple(found)


def blocks_of(parts: tuple[HeadRows, ...], whole: list[np.ndarray]) -> np.ndarray:
    """[N, bytes] of a rank, of the model's [N, rows, heads, bytes]."""
    own = [each[:, :, part.first : part.first + part.count] for part, each in zip(parts, whole, strict=True)]
    return np.concatenate([each.reshape(len(each), -1) for each in own], axis=1)


@pytest.mark.parametrize(("lenders", "targets"), list(product(SIZES, SIZES)))
def test_every_rank_gets_its_heads(lenders: int, targets: int) -> None:
    """And nothing else is written."""
    rng = np.random.default_rng(lenders * 10 + targets)
    whole = [rng.integers(0, 256, (5, rows, count, size)).astype(np.uint8)
             for (rows, size), count in zip(ROWS, HEADS, strict=True)]  # fmt: skip
    theirs = [parts_of(rank, lenders) for rank in range(lenders)]
    sources, into = [4, 0, 2], ints([1, 6, 3])
    asked = set()
    for rank in range(targets):
        parts = parts_of(rank, targets)
        expected = blocks_of(parts, whole)
        own = np.full((7, expected.shape[1]), 7, np.uint8)
        for lender, cuts in cuts_of(parts, theirs, rank / targets).items():
            asked.add(lender)
            staged = torch.from_numpy(blocks_of(theirs[lender], whole)[sources])
            put(torch.from_numpy(own), into, staged, cuts)
        assert np.array_equal(own[into], expected[sources])
        assert (own[[0, 2, 4, 5]] == 7).all()
    assert asked == set(range(lenders))


def address(rank: int, world: int) -> Address:
    """One whose blocks are these."""
    parts = parts_of(rank, world)
    return Address(
        host="here", pid=1, file=rank, nonce="", num_blocks=5, block_bytes=sum(each.num_bytes for each in parts),
        parts=parts,
    )  # fmt: skip


def group(rank: int, world: int) -> Group:
    return Group(rank, tuple(address(each, world) for each in range(world)))


def test_of_a_group_of_the_same_size_nothing_is_cut() -> None:
    """Nor if several ranks have the same heads."""
    for world in (1, 2, 4, 8):
        there = Address.parse(group(0, world).address)
        for rank in range(world):
            assert group(rank, world).lenders(there) == [(address(rank, world), [])]


def test_ranks_with_the_same_heads_are_asked_by_turns() -> None:
    """Eight have four heads of what guesses; each of four asks two that no other asks."""
    there = Address.parse(group(0, 8).address)
    asked = [each.file for rank in range(4) for each, _ in group(rank, 4).lenders(there)]
    assert sorted(asked) == list(range(8))


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts[:2],
        lambda parts: (HeadRows(7, 16, 0, 8), *parts[1:]),
        lambda parts: (*parts[:2], HeadRows(3, 16, 0, 4)),
        lambda parts: (HeadRows(6, 16, 0, 7), *parts[1:]),
    ],
)
def test_other_blocks_are_no_ones_part(change: object) -> None:
    """Fewer parts, other rows, other sizes, fewer heads."""
    assert callable(change)
    with pytest.raises(MoveError, match="has head"):
        cuts_of(parts_of(0, 1), [change(parts_of(0, 1))], 0.0)
