"""Limits of sampling from the largest logits of each part of the vocabulary, where these suffice to tell them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Limits(NamedTuple):
    """What rows want, [R] each: temperatures, which are not 0, and limits as in `sample_reference`."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class Candidates(NamedTuple):
    """Of all parts together: ``ordered`` [R, L] logits from the largest on; ``bound`` [R, 1], below which some are
    missing; ``mass`` [R, 1], the log of the sum of all exponentials of logit / temperature."""

    ordered: torch.Tensor
    bound: torch.Tensor
    mass: torch.Tensor


def own_candidates(part: torch.Tensor, temperature: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest of part [R, W], or all and -inf, and the log of its mass: [R, count + 1] float32."""
    largest = part.topk(min(count, part.shape[1]), dim=1).values
    mass = torch.logsumexp(part / temperature.unsqueeze(1), dim=1, keepdim=True)
    return torch.cat([F.pad(largest, (0, count - largest.shape[1]), value=-math.inf), mass], dim=1)


def joined(told: torch.Tensor, widths: Sequence[int]) -> Candidates:
    """What the parts of these ``widths`` told [N, R, count + 1]."""
    values, count = told[:, :, :-1], told.shape[2] - 1
    cut_short = [rank for rank, width in enumerate(widths) if width > count]
    bound = values[cut_short, :, -1:].amax(0) if cut_short else values.new_full((*values.shape[1:2], 1), -math.inf)
    ordered = values.transpose(0, 1).flatten(1).sort(dim=1, descending=True).values
    return Candidates(ordered, bound, torch.logsumexp(told[:, :, -1:], dim=0))


def cuts_of(found: Candidates, limits: Limits, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest kept logit of each row, and whether it is exact, [R] each.

    It is not where min_p or top_p reaches below what the candidates tell: then a row needs all of its logits.
    """
    ordered, bound, _ = found
    limited = ((limits.top_k > 0) & (limits.top_k < vocab)).unsqueeze(1)
    highest, heat = ordered[:, :1], limits.temperature.unsqueeze(1)
    last = torch.where(limited, limits.top_k.unsqueeze(1), 1).long() - 1
    kth = ordered.gather(1, last.clamp(max=ordered.shape[1] - 1))
    exact = ~limited | ((last < ordered.shape[1]) & (kth >= bound))
    min_p_cut = (highest + heat * torch.log(limits.min_p.clamp(min=0).unsqueeze(1))).minimum(highest)
    cut = torch.maximum(min_p_cut, torch.where(limited, kth, -math.inf))
    free = ~limited & (limits.min_p <= 0).unsqueeze(1)
    top_p_cut, reached = _top_p(found, cut, free, heat, limits.top_p.unsqueeze(1))
    asked = (limits.top_p < 1).unsqueeze(1)
    cut = torch.where(asked, torch.maximum(cut, top_p_cut), cut)
    return cut.squeeze(1), (exact & (~asked | reached)).squeeze(1)


def _top_p(
    found: Candidates, cut: torch.Tensor, free: torch.Tensor, heat: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest logit that top_p needs of those >= cut, and whether no candidate is missing to tell it, [R, 1]
    each; ``free``: nothing else limits the row, so the mass of all counts."""
    ordered, bound, whole = found
    known = ordered >= torch.maximum(cut, bound)
    kept_mass = torch.where(known, torch.exp((ordered - ordered[:, :1]) / heat), 0.0)
    mass = kept_mass.cumsum(1)
    total = torch.where(free, torch.exp(whole - ordered[:, :1] / heat), mass[:, -1:])
    needed = ((mass - kept_mass) < top_p * total) & known
    final = needed.sum(1, keepdim=True).clamp(min=1) - 1
    complete = bound == -math.inf
    reached = complete | ((free | (cut > bound)) & (mass[:, -1:] >= top_p * total))
    return ordered.gather(1, final), reached
