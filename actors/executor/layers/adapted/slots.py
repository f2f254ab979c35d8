"""The adapters of slots, on the host and on the device, and the plans of passes that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.adapted.products import AdapterPass
from pagebus.bus.messages import Int32Array


class AdapterSlots:
    """In which place each slot's adapter lies, -1: it has none. ``most_samples``: the most tokens that the last layer
    goes on with. ``adapt_heads``: adapters may change the head. All methods belong to the device thread, but
    :meth:`planned` and :meth:`sampled`, which captures call too."""

    def __init__(
        self, current: AdapterPass, ops: Ops, num_slots: int, most_samples: int, device: torch.device, *,
        adapt_heads: bool = False,
    ) -> None:  # fmt: skip
        self._current, self._ops, self.adapt_heads = current, ops, adapt_heads
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
        ending = plan = self._ops.plan_adapters(self._on_device.index_select(0, slots), query_start, num_tokens)
        if last is not None:
            starts = self._one_each[: len(last) + 1]
            ending = self._ops.plan_adapters(self._on_device.index_select(0, last), starts, len(last))
        self._current.begin(plan, ending)
        try:
            yield
        finally:
            self._current.end()

    @contextmanager
    def _of_rows(self, adapters: torch.Tensor, starts: torch.Tensor) -> Iterator[None]:
        """In this block logits are of rows with these places."""
        self._current.begin_logits(self._ops.plan_adapters(adapters, starts, len(adapters)))
        try:
            yield
        finally:
            self._current.begin_logits(None)

    def sampled(self, slots: torch.Tensor) -> AbstractContextManager[None]:
        """In this block logits are of one token of each of these ``slots`` [N]."""
        if not self.adapt_heads:
            return nullcontext()
        return self._of_rows(self._on_device.index_select(0, slots), self._one_each[: len(slots) + 1])

    def scored(self, index: torch.Tensor) -> AbstractContextManager[None]:
        """In this block logits are of these tokens [N] of this thread's newest pass."""
        if not self.adapt_heads:
            return nullcontext()
        of_token = self._current.of_token
        assert of_token is not None
        starts = torch.arange(len(index) + 1, dtype=torch.int32, device=index.device)
        return self._of_rows(of_token.index_select(0, index), starts)


def sampled(adapters: AdapterSlots | None, slots: torch.Tensor) -> AbstractContextManager[None]:
    """:meth:`AdapterSlots.sampled`, where there may be none."""
    return nullcontext() if adapters is None else adapters.sampled(slots)


def logits_at(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, adapters: AdapterSlots | None,
    index: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Those of the ``hidden`` states [T, H] of a pass whose tokens are in ``index`` [N]."""
    with nullcontext() if adapters is None else adapters.scored(index):
        return logits(hidden.index_select(0, index))


def copy_at_once(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy from the host in the order of launches; the host does not wait, and may free the source."""
    if target.is_cuda and not source.is_pinned():
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
