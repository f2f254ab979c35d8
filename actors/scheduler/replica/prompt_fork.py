"""Forks the choices of one request from its first, which computes the prompt for all of them.

A fork shares the full blocks by reference. It computes the prompt's last token again, to sample from it, and continues
behind it, so it needs its own copy of the block with that token (copy on write). The plan with which it enters makes
the copy before its pass. Until then the fork retains the source block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.actors.scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class Fork:
    """The ``blocks`` and ``windowed`` pages to share, from blocks ``first_block`` and ``first_windowed`` on, and the
    pages of the block to copy (none if the prompt's last token begins a block)."""

    blocks: list[int]
    copied: list[int]
    first_block: int = 0
    windowed: list[int] = field(default_factory=list)
    first_windowed: int = 0


def fork_of(replica: ReplicaBase, sequence: Sequence) -> Fork | None:
    """The part of the prompt, all but its last token, that a waiting sequence can share with the first of its request.
    None if that one does not run here, if no plan computes its whole prompt yet, if its window has passed the prompt's
    end, or if the waiting sequence has output."""
    leader, table = sequence.leader, replica.slots
    if leader is None or not leader.entered or not table.holds(leader):
        return None
    num_prompt = len(sequence.request.prompt)
    if table.computed[leader.slot] < num_prompt or len(sequence.tokens) > num_prompt or sequence.scores_prompt:
        return None
    num_shared, rest = divmod(num_prompt - 1, table.block_size)
    seen, gone = replica.kept.first_block(num_prompt - 1), leader.first_kept
    if seen < gone:
        return None
    first, each = replica.window.first_block(num_prompt - 1), replica.windowed_pages
    last = num_shared - leader.first_block
    blocks = leader.blocks[first - leader.first_block : last]
    copied = leader.blocks[last : last + 1] if rest else []
    if not each:
        return Fork(blocks, copied, first)
    last = (num_shared - gone) * each
    copied += leader.windowed[last : last + each] if rest else []
    return Fork(blocks, copied, first, leader.windowed[(seen - gone) * each : last], seen)
