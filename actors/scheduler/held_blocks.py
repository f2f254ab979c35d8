"""The blocks that a sequence holds: on the device of its replica, or in the host tier of its former one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Swapped:
    """A preempted sequence's copy in the host tier: its first ``num_tokens`` tokens lie in ``host_blocks`` of this
    replica, from its block ``first_block`` on. The last block may be partly filled. ``windowed_hosts``: what the
    sequence had in ``windowed``, from block ``first_windowed`` on."""

    replica: str
    host_blocks: list[int]
    num_tokens: int
    first_block: int = 0
    windowed_hosts: list[int] = field(default_factory=list)
    first_windowed: int = 0

    @property
    def hosts(self) -> list[int]:
        """All host blocks."""
        return self.host_blocks + self.windowed_hosts


@dataclass(slots=True, eq=False, kw_only=True)
class HeldBlocks:
    """``replica`` names the replica that the sequence runs on, and ``blocks`` is its block table there, from its block
    ``first_block`` on: those before lie behind the model's sliding window and are not held. Where only some layers have
    a window, ``blocks`` are pages of the others, and ``windowed`` those of the layers with one: block by block from
    ``first_windowed`` on, each as many pages as its replica has ``windowed_pages``. ``num_cached``: tokens that were
    computed when it got them.

    ``copied``: a pending copy on write of a block as (source pages, own pages), made by the next plan; the sources are
    retained until then.
    """

    replica: str | None = None
    blocks: list[int] = field(default_factory=list)
    first_block: int = 0
    windowed: list[int] = field(default_factory=list)
    first_windowed: int = 0
    num_cached: int = 0
    copied: tuple[list[int], list[int]] | None = None
    swapped: Swapped | None = None

    @property
    def end_block(self) -> int:
        """The end of its block table on this replica, counting the blocks before ``first_block``."""
        return self.first_block + len(self.blocks)

    @property
    def pages(self) -> list[int]:
        """All pages that it holds of the device's pool."""
        return self.blocks + self.windowed if self.windowed else self.blocks

    @property
    def first_kept(self) -> int:
        """The first block of which it holds all pages."""
        return max(self.first_block, self.first_windowed)

    def hold(self, blocks: list[int], windowed: list[int], num_cached: int, first: tuple[int, int] = (0, 0)) -> None:
        """Hold these pages, of which ``num_cached`` tokens are computed. ``first``: the block that ``blocks`` begin
        with, and that of ``windowed``."""
        self.blocks, self.windowed, self.num_cached = blocks, windowed, num_cached
        self.first_block, self.first_windowed = first

    def copy_into(self, sources: list[int], own: list[int]) -> None:
        """Have the next plan copy the pages ``sources`` into its ``own``."""
        self.copied = sources, own

    def copy_planned(self) -> None:
        """Its copy is planned, or no longer wanted."""
        self.copied = None

    def give_back(self, keep: int, windowed_pages: int) -> list[int]:
        """Remove the pages of layers with windows before block ``keep`` from its table, and return them."""
        if windowed_pages:
            count = (keep - self.first_windowed) * windowed_pages
            gone, self.windowed, self.first_windowed = self.windowed[:count], self.windowed[count:], keep
            return gone
        count = keep - self.first_block
        gone = self.blocks[:count]
        del self.blocks[:count]
        self.first_block = keep
        return gone

    def release(self) -> None:
        """It holds nothing on the device any more."""
        self.blocks, self.first_block, self.windowed, self.first_windowed = [], 0, [], 0

    def belong_to(self, replica: str | None) -> None:
        """It runs on this replica, or expects results of it; None: on none."""
        self.replica = replica

    def swap(self, swapped: Swapped | None) -> None:
        """It has a copy in a host tier; None: it has none any more."""
        self.swapped = swapped
