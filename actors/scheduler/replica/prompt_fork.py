"""The choices of one request share its prompt: the first computes it, the others fork from that one.

A fork shares the full blocks by reference. The block that holds the prompt's last token it needs for itself, because it
computes that token again, to sample from, and goes on behind it: so it starts with a copy of the first one's (copy on
write), which the plan makes in which it enters, before its pass. Until then it holds the source as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.scheduler.replica.slots import SlotTable
from pagebus.actors.scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class Fork:
    """``blocks`` to share, and the one to copy (None if the prompt's last token begins a block)."""

    blocks: list[int]
    copied: int | None


def fork_of(sequence: Sequence, table: SlotTable) -> Fork | None:
    """What a waiting sequence can take over from the first of its request: all of the prompt but the last token. None
    if that one does not run here, has not been planned to compute its prompt, or the sequence has gone further."""
    leader = sequence.leader
    if leader is None or not leader.entered or not table.holds(leader):
        return None
    num_prompt = len(sequence.request.prompt)
    if table.computed[leader.slot] < num_prompt or len(sequence.tokens) > num_prompt or sequence.scores_prompt:
        return None
    num_shared, rest = divmod(num_prompt - 1, table.block_size)
    return Fork(leader.blocks[:num_shared], leader.blocks[num_shared] if rest else None)
