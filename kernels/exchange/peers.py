"""The memory that ranks of one host exchange through: what lies where in it, and in which state it begins.

Each rank has one region of the same layout, which all ranks can write to. What is exchanged is written into the memory
of the rank that needs it, so nobody waits for a read over the link. The areas of a region, per form of exchange:

- ``push``: two buffers in turn, with a slot per sender, full of holes (see :data:`HOLE`) but while data is on its way;
- ``signal``: two buffers in turn, with a slot per sender, and a word per (block of the grid, sender) that counts calls;
- ``two_shot``: an inbox with a slot per sender, an outbox for whole sums, and words as above for each turn of a call;
- ``gather``: two buffers in turn, with a slot per sender, where each word lies beside the number of its call.

Why two buffers, or one, are enough stands in docs/exchange.md. The count of calls per form lies in ``state``,
memory of the rank alone, and is advanced by the kernels: what a CUDA graph repeats are constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

FAILED, HOST_WORDS = 0, 8
"""The word of ``state`` that says that a wait was given up, and the words of the host's note of it."""
CELLS = 256
"""Counters per form, one for each block that a grid may have."""
SENDERS = 8
"""Words per block, of which a rank uses that of its own number: the largest number of ranks."""
TURNS = 16
"""Of a call of ``two_shot``, at most."""
FIRST_CELL = 64
HOLE = -0x7FFF8000
"""The word (0x80008000) that says that nothing has arrived yet: -0.0 twice in formats of 16 bits, and nearly that in
float32. Senders write 0.0 in its place."""
FORMS = ("push", "signal", "two_shot", "gather")
PUSH, SIGNAL, TWO_SHOT, GATHER = range(4)
ALIGNMENT = 256
SLACK = 256 * 1024
"""Bytes by which a share of rows, rounded up to whole rows, may exceed its part."""


class Limits(NamedTuple):
    """The most bytes that one rank may tell in one call, per form of exchange."""

    push: int = 2 * 1024 * 1024
    signal: int = 4 * 1024 * 1024
    two_shot: int = 16 * 1024 * 1024
    gather: int = 64 * 1024


LIMITS_OF_TWO = Limits(two_shot=64 * 1024 * 1024)
"""Between two ranks our form is the fastest at all sizes."""


@dataclass(frozen=True, slots=True)
class Area:
    """A part of a region, in bytes: where it begins, and how far its slots are apart."""

    start: int
    slot: int


class Layout:
    """Where the areas of a region of one of ``world`` ranks lie.

    Args:
        world: ranks, 2 to 8.
        limits: bytes per call.
    """

    def __init__(self, world: int, limits: Limits | None = None) -> None:
        assert 2 <= world <= SENDERS
        self.world, self.limits = world, limits or (LIMITS_OF_TWO if world == 2 else Limits())
        self._end = 0
        flags = CELLS * SENDERS * 4
        self.signal_flags, self.two_shot_flags = self._area(flags, 1), self._area(flags, TURNS + 1)
        self.gather = self._area(2 * self.limits.gather, 2 * world)
        self.push = self._area(self.limits.push, 2 * world)
        self.signal = self._area(self.limits.signal, 2 * world)
        share = _aligned(self.limits.two_shot // world + SLACK)
        self.inbox = self._area(share, world)
        self.outbox = self._area(share * world, 1)
        self.num_bytes = self._end

    def _area(self, slot: int, slots: int) -> Area:
        area = Area(self._end, _aligned(slot))
        self._end += area.slot * slots
        return area

    def clear(self, region: torch.Tensor) -> None:
        """Bring a region, uint8 [num_bytes], into the state before the first call; before any peer knows of it."""
        words = region.view(torch.int32)
        words.zero_()
        words[self.push.start // 4 : self.signal.start // 4] = HOLE

    def new_state(self, device: torch.device) -> torch.Tensor:
        """Counters, int32, before the first call."""
        return torch.zeros(FIRST_CELL + len(FORMS) * CELLS, dtype=torch.int32, device=device)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Peers:
    """What kernels of one rank need to exchange.

    Args:
        rank: 0 to N - 1.
        layout: of the regions of all N ranks.
        table: int64 [N + 1] on the device: addresses of all regions, and of the host's note (int32 [8], pinned), which
            says of the first wait that was given up: 1, form, sender that was missing, call, block.
        state: counters, as of :meth:`Layout.new_state`.
        patience_ns: how long a kernel waits for a peer; after that it and all later ones go on without.
    """

    rank: int
    layout: Layout
    table: torch.Tensor
    state: torch.Tensor
    patience_ns: int = 30_000_000_000
    max_blocks: int = 128
    """Blocks that run at once on every rank's GPU; a larger grid might wait for blocks of a peer that never start."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.layout.world
