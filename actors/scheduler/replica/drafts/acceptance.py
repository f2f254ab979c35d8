"""Counts verified and accepted drafts of one replica."""

from __future__ import annotations

import numpy as np

from pagebus.bus.messages import Int32Array


class Acceptance:
    """Totals of one replica: rows that verified drafts, drafts, those accepted, and the latter by their place behind
    the last token, [num_drafts]."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted = 0
        self.accepted_at = [0] * num_drafts

    def count(self, drafted: Int32Array, accepted: Int32Array) -> None:
        """Add one step: by row [m] its drafts, and how many of them were accepted."""
        self.num_drafts += int(np.count_nonzero(drafted))
        self.num_draft_tokens += int(drafted.sum())
        self.num_accepted += int(accepted.sum())
        for place in range(int(accepted.max(initial=0))):
            self.accepted_at[place] += int(np.count_nonzero(accepted > place))
