"""Experts' weights as some files stack them: inputs before outputs, or interleaved rows of gate and up.

They have as many numbers as ours, so they are loaded into the memory that ours will have, and put into order there,
expert by expert.
"""

from __future__ import annotations

import torch


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of weights [E, N, K] as files with inputs first have it, [E, K, N]. Biases [E, N] are as they are."""
    return tensor if tensor.dim() == 2 else tensor.view(len(tensor), tensor.shape[2], tensor.shape[1])


def put_in_order(tensor: torch.Tensor, *, columns_first: bool, by_turns: bool) -> None:
    """Make what was loaded rows of outputs, in place: ``columns_first``, of :func:`as_stored`; ``by_turns``, of rows of
    gate and up that alternate, all gates before all ups. Takes memory for one expert."""
    for ours, stored in zip(tensor, as_stored(tensor) if columns_first else tensor, strict=True):
        rows = stored.t() if columns_first and stored.dim() == 2 else stored
        ours.copy_(torch.cat((rows[::2], rows[1::2])) if by_turns else rows.clone())
