"""A second graph behind a step's graph, which samples again for rows that need more than plain sampling.

Launching it kernel by kernel takes longer than computing it, and the device waits for it when grammar masks come late.
The graph samples all rows of the pass again. Options that a row does not use change nothing for it, so its token stays
the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.executor.batch.buckets import Bucket
from pagebus.actors.executor.batch.step_work import Extras, StepWork

MAX_SCRATCH_BYTES = 1 << 26
"""More is left to launches: steps of so many rows take long enough to hide them, and memory is for the cache."""


@dataclass(frozen=True, slots=True)
class Resampling:
    """What such a graph does: ``extras`` for the rows of ``bucket``, with tables that have grown ``num_growths`` times
    (they are elsewhere from then on)."""

    bucket: Bucket
    extras: Extras
    num_growths: int


def resampling_of(work: StepWork, bucket: Bucket, num_growths: int, vocab_size: int) -> Resampling | None:
    """What is to be sampled again in a step that is padded to ``bucket``; None if no graph does that: logits are left
    as they are for scores."""
    extras = work.extras
    if work.logprob_rows is not None or (extras.penalized and 4 * bucket.rows * vocab_size > MAX_SCRATCH_BYTES):
        return None
    return Resampling(bucket, extras, num_growths)
