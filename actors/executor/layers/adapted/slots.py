"""The adapters of slots, on the host and on the device, and the plans of passes that are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.adapted.products import AdapterPass
from pagebus.bus.messages import Int32Array


class AdapterSlots:
    """In which place each slot's adapter lies, -1: it has none. ``most_samples``: the most tokens that the last layer
    goes on with. All methods belong to the device thread, but :meth:`planned`, which captures call too."""

    def __init__(self, current: AdapterPass, ops: Ops, num_slots: int, most_samples: int, device: torch.device) -> None:
        self._current, self._ops = current, ops
        self.of_slot: Int32Array = np.full(num_slots, -1, np.int32)
        self._sent = self.of_slot.copy()
        self._on_device = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self._assumed = False
        self._one_each = torch.arange(most_samples + 1, dtype=torch.int32, device=device)

    def send(self, slots: Int32Array) -> bool:
        """Have the device follow before a step of these slots; False: none of them has an adapter."""
        if not len(slots) or (int(self.of_slot[slots].max()) < 0 and not self._assumed):
            return False
        if not np.array_equal(self._sent, self.of_slot):
            self._sent[:] = self.of_slot
            copy_at_once(self._on_device, torch.from_numpy(self._sent.copy()))
        return True

    @contextmanager
    def assumed(self) -> Iterator[None]:
        """In this block every step launches what one with adapters does, to measure its memory and to compile its
        kernels."""
        self._assumed = True
        try:
            yield
        finally:
            self._assumed = False

    @contextmanager
    def planned(self, slots: torch.Tensor, query_start: torch.Tensor, num_tokens: int, last: torch.Tensor | None) -> (
        Iterator[None]
    ):  # fmt: skip
        """In this block a pass adds what adapters of its rows add: ``slots`` [R], ``query_start`` [R + 1], and the
        slots of the ``last`` tokens [N]."""
        plan = self._ops.plan_adapters(self._on_device.index_select(0, slots), query_start, num_tokens)
        ending = plan
        if last is not None:
            starts = self._one_each[: len(last) + 1]
            ending = self._ops.plan_adapters(self._on_device.index_select(0, last), starts, len(last))
        self._current.begin(plan, ending)
        try:
            yield
        finally:
            self._current.begin(None, None)


def copy_at_once(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy from the host in the order of launches; the host does not wait, and may free the source."""
    if target.is_cuda and not source.is_pinned():
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
