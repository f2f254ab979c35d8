"""What a query sees of the tokens before it, as one number: its ``reach``.

Above 0: that many of the newest tokens, itself among them (a sliding window). Below 0: positions are cut into runs of
minus that many, and it sees its own run up to itself (chunked attention). 0: all tokens, which kernels do not ask
about.
"""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import tl, triton


def first_seen_reference(position: torch.Tensor, reach: int) -> torch.Tensor:
    """The first place that queries at these positions see, perhaps below 0; ``reach`` is not 0."""
    return position - reach + 1 if reach > 0 else position - position % -reach


@triton.jit
def first_seen(position, reach):
    """The first place that queries at these positions see, perhaps below 0; ``reach`` is not 0."""
    return tl.where(reach > 0, position - reach + 1, position - position % tl.maximum(-reach, 1))
