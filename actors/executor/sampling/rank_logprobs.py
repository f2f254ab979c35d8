"""Log probabilities over ranks: each tells the largest logits and the sum of its range of the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagebus.actors.executor.device.comm import Comm
from pagebus.kernels.sampling.logprobs import keys_reference, packed_reference, without_nan

LEAST = -(1 << 63)
"""A key below that of any token."""


class RankLogprobs:
    """For logits [R, len(own)] of the tokens ``own``. Shapes of exchanges follow from what is asked for."""

    def __init__(self, comm: Comm, own: range) -> None:
        self._comm, self._own = comm, own

    def token_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        """As `token_logprobs_reference`, of tokens [R] of the whole vocabulary."""
        keys, width = keys_reference(logits, self._own.start), len(self._own)
        places = tokens.long().unsqueeze(1) - self._own.start
        mine = (places >= 0) & (places < width)
        own = keys.gather(1, places.clamp(0, width - 1)).masked_fill(~mine, LEAST)
        largest = keys.topk(min(num_top, width), dim=1).values
        told = self._comm.all_gather(torch.cat([own, F.pad(largest, (0, num_top - largest.shape[1]), value=LEAST)], 1))
        sums = self._comm.all_gather(torch.logsumexp(without_nan(logits), dim=1, keepdim=True))
        own = told[:, :, :1].amax(0)
        before = self._comm.all_gather((keys > own).sum(1, keepdim=True)).sum(0)
        top = told[:, :, 1:].transpose(0, 1).flatten(1).topk(num_top, dim=1).values
        return packed_reference(own, before + 1, top, torch.logsumexp(sums, dim=0))

    def pick_logits(self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Those of ``ids`` [K], of the whole vocabulary, in ``rows`` [K]."""
        places = ids - self._own.start
        mine = (places >= 0) & (places < len(self._own))
        picked = logits[rows, places.clamp(0, len(self._own) - 1)].masked_fill(~mine, 0.0)
        return self._comm.all_reduce(picked)
