"""The masks of one step's constrained rows on the device: they come late, and beside what the device computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.actors.executor.device.device import new_event, new_stream


@dataclass(frozen=True, slots=True)
class _Streams:
    """``copying`` runs beside ``launching``, which goes on behind ``copied``."""

    copying: torch.cuda.Stream
    launching: torch.cuda.Stream
    copied: torch.cuda.Event


class StepMasks:
    """``masks`` [M, ceil(V / 32)] int32 of M = ``most_samples`` rows, of which a step uses the first C; without any row
    until :meth:`make`. On CUDA they always lie at the same address, because captured graphs read them there. Belongs to
    the thread that launches steps.
    """

    def __init__(self, most_samples: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._shape = most_samples, -(-vocab_size // 32)
        self._parts: dict[int, torch.Tensor] = {}
        """The first so many masks, of sizes met before."""
        self._streams: _Streams | None = None
        self.masks = torch.empty((0, self._shape[1]), dtype=torch.int32, device=device)

    def make(self) -> None:
        """Have room for the masks of any step."""
        if not len(self.masks):
            self.masks = torch.empty(self._shape, dtype=torch.int32, device=self._device)
            if self._device.type == "cuda":
                launching = torch.cuda.current_stream(self._device)
                self._streams = _Streams(new_stream(self._device), launching, new_event())

    def send(self, masks: torch.Tensor) -> None:
        """``masks`` [C, ceil(V / 32)] of this step, on the host, pinned if that matters. What is launched from here on
        finds them. No step that reads other ones may be under way.

        The copy does not wait for what was launched before: the step's own forward pass, as a rule."""
        count = len(masks)
        if (part := self._parts.get(count)) is None:
            part = self._parts[count] = self.masks[:count]
        streams = self._streams
        if streams is None:
            part.copy_(masks)
            return
        torch.cuda.set_stream(streams.copying)
        try:
            part.copy_(masks, non_blocking=True)
        finally:
            torch.cuda.set_stream(streams.launching)
        streams.copied.record(streams.copying)
        streams.copied.wait(streams.launching)
