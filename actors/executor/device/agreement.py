"""What ranks must agree on at each step, told beside the tokens that they sample, and how far copies of each are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagebus.actors.executor.device.comm import ONE_RANK, Comm
from pagebus.actors.executor.device.errors import EngineError

WORDS, COPIED = 3, 2
"""The step and a digest, 32 bits each; then the step up to which the rank's copies between the tiers are done."""


class Agreement:
    """The words of each rank, which travel with what ranks tell each other. Device thread."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.own = torch.zeros(WORDS, dtype=torch.int32)
        """This rank's, where the upload of each step puts them."""
        self.told: torch.Tensor | None = None
        """Of a GPU: those of all ranks [N, 3] in the last exchange, which :func:`compare` is for, once they are on the
        host. On a CPU they are compared at once."""

    def use(self, own: torch.Tensor) -> None:
        """From here on this rank's are those in ``own`` [3], on the device that computes."""
        self.own = own
        if self.comm.size > 1 and not own.is_cpu:
            self.told = torch.zeros((self.comm.size, WORDS), dtype=torch.int32, device=own.device)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] int32 of every rank, in the order of ranks: [N, ...].

        Raises:
            EngineError: on a CPU: a rank is at another step, or has another digest; or it is lost.
        """
        told = self.comm.all_gather(torch.cat([x.reshape(-1), self.own]))
        each = told[:, -WORDS:]
        if self.told is None:
            compare(each.tolist())
        else:
            self.told.copy_(each)
        return told[:, :-WORDS].reshape(self.comm.size, *x.shape)

    def settle(self) -> None:
        """Compare in a step that samples nothing. Raises as :meth:`exchange`."""
        if self.comm.size > 1:
            self.exchange(torch.empty(0, dtype=torch.int32, device=self.own.device))


def compare(told: Sequence[Sequence[int]]) -> None:
    """Check that all ranks have told the same step and digest.

    Raises:
        EngineError: they have not.
    """
    if all(each[:COPIED] == told[0][:COPIED] for each in told):
        return
    texts = (f"rank {rank}: step {step}, {digest & 0xFFFFFFFF:08x}" for rank, (step, digest, _) in enumerate(told))
    text = ", ".join(texts)
    raise EngineError(f"the ranks have drifted apart ({text})")


def copied_by_all(told: Sequence[Sequence[int]], step: int) -> int:
    """Up to which step the copies of all ranks between the tiers are done, by what they have told in this one: 32 bits
    of it, as of the step, which may be larger."""
    return step - max((step - each[COPIED]) & 0xFFFFFFFF for each in told)


ALONE = Agreement(ONE_RANK)
"""That of a replica of one rank."""
