"""Segments: runs of neighbouring tokens of a step that have the same adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Ints: TypeAlias = Sequence[int] | npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segments:
    """The first ``number`` [1] of M places say something; tokens in none of them have no adapter.

    Segment i is the tokens from ``first_token[i]`` on, ``count[i]`` of them, with the adapter in place ``adapter[i]``
    of the tables. All are int32, and no token is in two.
    """

    first_token: torch.Tensor
    count: torch.Tensor
    adapter: torch.Tensor
    number: torch.Tensor

    @classmethod
    def of_rows(cls, query_start: Ints, places: Ints, capacity: int, device: torch.device) -> Segments:
        """Of R rows: row i has the tokens from ``query_start[i]`` to ``query_start[i + 1]``, and the adapter in
        ``places[i]``, below 0 none.

        Raises:
            ValueError: there are more than ``capacity``.
        """
        starts = np.asarray(query_start, np.int32)
        begins = np.flatnonzero(np.diff(places, prepend=np.int32(-1)))  # rows that differ from the one before
        first, ends = starts[begins], np.append(starts[begins[1:]], starts[-1:])
        adapter = np.asarray(places, np.int32)[begins]
        kept = (adapter >= 0) & (ends > first)
        number = int(kept.sum())
        if number > capacity:
            raise ValueError(f"{number} segments: there is room for {capacity}")
        table = np.zeros((3, capacity), np.int32)
        table[:, :number] = first[kept], (ends - first)[kept], adapter[kept]
        columns = torch.from_numpy(table).to(device)
        return cls(columns[0], columns[1], columns[2], torch.tensor([number], dtype=torch.int32, device=device))
