"""Estimates how likely the drafts of each slot are to be accepted, from earlier ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.replica.slots import Slots
from pagebus.bus.messages import Int32Array

FORGET_SLOT = 0.75
"""Weight of a slot's step relative to the one after it: text changes from copied to new, and back, within a few
steps."""
FORGET_ALL = 0.98
"""The same for the average over all slots."""
PRIOR = 2.0
"""The weight of the average over all slots in a slot's estimate, in drafts tried."""
FIRST_RIGHT, FIRST_TRIED = 2.0, 4.0
"""The average over all slots before the first step, as drafts accepted and tried."""
MOST = 0.98


class Chances:
    """The chances of one replica. A draft counts as tried if it was planned and all before it were accepted. ``tried``
    and ``right`` [num_slots] count those and the accepted ones by slot, with less weight for older steps."""

    def __init__(self, num_slots: int) -> None:
        self.tried = np.zeros(num_slots, np.float64)
        self.right = np.zeros(num_slots, np.float64)
        self._all_tried, self._all_right = FIRST_TRIED, FIRST_RIGHT

    def clear(self, slot: int) -> None:
        """Another sequence enters the slot."""
        self.tried[slot] = self.right[slot] = 0.0

    def learn(self, slots: Slots, planned: Int32Array, accepted: Int32Array) -> None:
        """Learn how many of the drafts ``planned`` for each slot [m] in a step were ``accepted``."""
        if not np.count_nonzero(planned):
            return
        rows = planned > 0
        slots, right = slots[rows], accepted[rows].astype(np.float64)
        tried = right + (accepted[rows] < planned[rows])
        self.tried[slots] = self.tried[slots] * FORGET_SLOT + tried
        self.right[slots] = self.right[slots] * FORGET_SLOT + right
        share = 1 / len(slots)  # a step counts as much as another, of however many rows
        self._all_tried = self._all_tried * FORGET_ALL + float(tried.sum()) * share
        self._all_right = self._all_right * FORGET_ALL + float(right.sum()) * share

    def of(self, slots: Slots) -> NDArray[np.float64]:
        """For each slot, the chance (0 to ``MOST``) that a draft is accepted if all before it were."""
        usual = self._all_right / self._all_tried
        chances = (self.right[slots] + PRIOR * usual) / (self.tried[slots] + PRIOR)
        clipped: NDArray[np.float64] = np.minimum(chances, MOST)
        return clipped
