"""What ranks must agree on at each step, told beside the tokens that they sample."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.comm import ONE_RANK, Comm
from pagebus.actors.executor.device.errors import EngineError


class Agreement:
    """Two numbers of 32 bits, the step and a digest, that travel with what ranks tell each other. Device thread."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._own = torch.zeros(2, dtype=torch.int32)
        self._told = True

    def begin(self, step: int, digest: int) -> None:
        """From here on these are this rank's."""
        self._own = torch.tensor([step, digest]).to(torch.int32)  # the low 32 bits of each
        self._told = False

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] int32 of every rank, in the order of ranks: [N, ...].

        Raises:
            EngineError: a rank is at another step, or has another digest; or it is lost.
        """
        told = self.comm.all_gather(torch.cat([x.reshape(-1), self._own.to(x.device)]))
        self._told = True
        each = told[:, -2:]
        if not torch.equal(each, each[:1].expand_as(each)):
            numbers = [(step, digest & 0xFFFFFFFF) for step, digest in each.tolist()]
            text = ", ".join(f"rank {rank}: step {step}, {digest:08x}" for rank, (step, digest) in enumerate(numbers))
            raise EngineError(f"the ranks have drifted apart ({text})")
        return told[:, :-2].reshape(self.comm.size, *x.shape)

    def settle(self) -> None:
        """Compare now, if nothing was exchanged since :meth:`begin`. Raises as :meth:`exchange`."""
        if not self._told and self.comm.size > 1:
            self.exchange(torch.empty(0, dtype=torch.int32))


ALONE = Agreement(ONE_RANK)
"""That of a replica of one rank."""
