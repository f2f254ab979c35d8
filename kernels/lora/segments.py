"""Segments: runs of neighbouring tokens of a step that have the same adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
