"""Forks the choices of one request from its first, which computes the prompt for all of them.

A fork shares the full blocks by reference. It computes the prompt's last token again, to sample from it, and continues
behind it, so it needs its own copy of the block with that token (copy on write). The plan with which it enters makes
the copy before its pass. Until then the fork retains the source block.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.model.window import Window
from pagebus.actors.scheduler.replica.slots import SlotTable
from pagebus.actors.scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class Fork:
    """The ``blocks`` to share, from block ``first_block`` on, and the one to copy (None if the prompt's last token
    begins a block)."""

    blocks: list[int]
    copied: int | None
    first_block: int = 0


def fork_of(sequence: Sequence, table: SlotTable, window: Window) -> Fork | None:
    """The part of the prompt, all but its last token, that a waiting sequence can share with the first of its request.
    None if that one does not run here, no plan computes its prompt yet, or the prompt's end lies behind its window
    already, or if the sequence has more tokens."""
    leader = sequence.leader
    if leader is None or not leader.entered or not table.holds(leader):
        return None
    num_prompt = len(sequence.request.prompt)
    if table.computed[leader.slot] < num_prompt or len(sequence.tokens) > num_prompt or sequence.scores_prompt:
        return None
    num_shared, rest = divmod(num_prompt - 1, table.block_size)
    first, gone = window.first_block(num_prompt - 1), leader.first_block
    if first < gone:
        return None
    last = num_shared - gone
    return Fork(leader.blocks[first - gone : last], leader.blocks[last] if rest else None, first)
