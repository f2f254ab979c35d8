"""Logit biases and bans, host side: the slots that have some, and their rows on the device.

A rule adds a value to a token's logit up to its own output index. A row of the table stays on the device until another
sequence needs a different one.
"""

from __future__ import annotations

import numpy as np

from pagebus.actors.executor.batch.token_masks import banned_tokens
from pagebus.bus.messages import Int32Array, NewSequence

FOREVER = 2**31 - 1
MIN_WIDTH = 8


class LogitBias:
    """Collects the rows of sequences that enter, then hands them over with :meth:`pack`. ``until`` [S], which it fills:
    the output index from which on no rule of the slot is left."""

    def __init__(self, until: Int32Array, vocab_size: int) -> None:
        self._until = until
        self._vocab_size = vocab_size
        self._width = 0
        self._ruled: set[int] = set()
        self._new: list[tuple[int, list[tuple[int, float, int]]]] = []

    def enter(self, new: NewSequence) -> None:
        """Note the row of a sequence that enters its slot."""
        slot, rules = new.slot, _rules_of(new, self._vocab_size)
        self._until[slot] = max((until for _, _, until in rules), default=0)
        if rules or slot in self._ruled:
            self._new.append((slot, rules))
            (self._ruled.add if rules else self._ruled.discard)(slot)

    def pack(self, deltas: dict[str, Int32Array]) -> None:
        """Put what was noted into ``deltas``: ``rule_slots`` [n] with ``rule_ids``, ``rule_values`` and ``rule_until``
        [n * K]; K grows in powers of two with the longest list met."""
        rows, self._new = self._new, []
        if not rows:
            return
        longest = max(len(rules) for _, rules in rows)
        while self._width < longest:
            self._width = max(MIN_WIDTH, self._width * 2)
        ids = np.full((len(rows), self._width), -1, np.int32)
        values = np.zeros((len(rows), self._width), np.float32)
        until = np.zeros((len(rows), self._width), np.int32)
        for row, (_, rules) in enumerate(rows):
            for column, (token_id, value, end) in enumerate(rules):
                ids[row, column], values[row, column], until[row, column] = token_id, value, end
        deltas["rule_slots"] = np.array([slot for slot, _ in rows], np.int32)
        deltas["rule_ids"] = ids.reshape(-1)
        deltas["rule_values"] = values.reshape(-1).view(np.int32)
        deltas["rule_until"] = until.reshape(-1)


def _rules_of(new: NewSequence, vocab_size: int) -> list[tuple[int, float, int]]:
    """(token id, value added, up to which output index); ids outside the vocabulary are left out."""
    sampling = new.sampling
    too_early = new.end_token_ids if sampling.min_tokens > 0 else ()
    bans = [(token_id, -np.inf, sampling.min_tokens) for token_id in too_early]
    bans += [(token_id, -np.inf, FOREVER) for token_id in banned_tokens(sampling)]
    biases = [(token_id, value, FOREVER) for token_id, value in sampling.logit_bias.items()]
    return [rule for rule in bans + biases if 0 <= rule[0] < vocab_size]
