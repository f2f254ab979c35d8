"""How many tokens went to each expert: counted on the device by routing, read now and then behind a step.

The device thread starts a copy, and any one other thread takes what has arrived. Nobody waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagebus.actors.executor.device.device import new_event

READ_EVERY_S = 1.0


class ExpertCounts:
    """Of L layers with E experts each. ``counts``: L tensors [E] int32 that grow and wrap around; what they hold by now
    does not count."""

    def __init__(self, counts: Sequence[torch.Tensor]) -> None:
        self._counts = counts
        pinned = counts[0].is_cuda
        self._copy = torch.empty((len(counts), len(counts[0])), dtype=torch.int32, pin_memory=pinned)
        self._copy.copy_(torch.stack(list(counts)))
        self._arrived = new_event() if pinned else None
        self._on_its_way = False
        self._due_s = 0.0
        self._before = self._copy.numpy().copy()
        self._totals = np.zeros(self._before.shape, np.int64)

    def fetch(self, now_s: float | None = None) -> None:
        """Start a copy, if the last is a while ago and has been taken. Device thread, behind a step."""
        now_s = time.monotonic() if now_s is None else now_s
        if self._on_its_way or now_s < self._due_s:
            return
        self._due_s = now_s + READ_EVERY_S
        self._copy.copy_(torch.stack(list(self._counts)), non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._on_its_way = True

    def totals(self) -> npt.NDArray[np.int64]:
        """Tokens by layer and expert [L, E] as of the last copy that has arrived. One thread, any but the device's."""
        if self._on_its_way and (self._arrived is None or self._arrived.query()):
            now = self._copy.numpy()
            self._totals += (now - self._before).view(np.uint32)
            self._before = now.copy()
            self._on_its_way = False
        return self._totals
