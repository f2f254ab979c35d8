"""The masks of a step's constrained rows, handed from the thread that fills them to the one that launches the step.

There is one buffer. It is filled anew when the tokens have come that were sampled with what it held, so the device has
read it.
"""

from __future__ import annotations

import queue

import numpy as np
import torch

from actors.executor.layout import BatchLimits


class StepMasks:
    """Masks [S, ceil(V / 32)] int32, one bit per token, on the host; pinned where a device copies them."""

    def __init__(self, limits: BatchLimits, *, pinned: bool) -> None:
        self._pinned = pinned
        self._shape = (limits.max_num_seqs, -(-limits.vocab_size // 32))
        self._words: torch.Tensor | None = None
        self._filled: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.array = np.empty((0, self._shape[1]), np.int32)
        """The masks, for whoever fills them; there once :meth:`allocate` has been called."""

    def allocate(self) -> None:
        """Before the first are filled."""
        if self._words is None:
            self._words = torch.empty(self._shape, dtype=torch.int32, pin_memory=self._pinned)
            self.array = self._words.numpy()

    def give(self, error: BaseException | None = None) -> None:
        """Those of the next step are filled, or cannot be."""
        self._filled.put(error)

    def take(self, count: int) -> torch.Tensor:
        """Wait until those of the next step are filled: the first ``count``, until its tokens have come.

        Raises:
            BaseException: why they cannot be filled.
        """
        if (error := self._filled.get()) is not None:
            raise error
        assert self._words is not None
        return self._words[:count]
