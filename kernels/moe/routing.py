"""Which experts each token goes to, and with which weights: scores, groups, the best k of them, in one kernel.

All is in float32, as 16 bits would make ties. Of equal scores the expert of the lower index wins. Logits that are NaN
count as the smallest number: every token gets k different experts that exist, whatever the logits are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import constant, next_power_of_2, tl, triton


class Score(StrEnum):
    """What becomes of logits: a softmax over all experts, sigmoids, or a softmax over the chosen ones alone."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_TOP = "softmax_of_top"


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen.

    The best ``top_k`` are taken by score plus bias, if there is one, and weigh as their scores without it; these are
    divided by their sum if ``renormalise``, and multiplied by ``factor``. With several ``groups``, of equal numbers of
    experts, only those of the best ``keep_groups`` can be chosen: by the sum of a group's best ``group_best`` (1 or 2).
    """

    top_k: int
    score: Score = Score.SOFTMAX
    renormalise: bool = True
    factor: float = 1.0
    groups: int = 1
    keep_groups: int = 1
    group_best: int = 1

    def check(self, num_experts: int) -> None:
        """Raises ValueError if experts cannot be chosen from this many in this way."""
        if num_experts % self.groups:
            raise ValueError(f"{num_experts} experts are no {self.groups} groups of equal size")
        if not 1 <= self.keep_groups <= self.groups:
            raise ValueError(f"{self.keep_groups} of {self.groups} groups cannot be kept")
        candidates = num_experts // self.groups * self.keep_groups
        if not 1 <= self.top_k <= candidates:
            raise ValueError(f"{self.top_k} experts cannot be chosen from {candidates}")
        if self.group_best not in (1, 2) or self.group_best * self.groups > num_experts:
            raise ValueError("groups are compared by their best one or two experts, which each must have")


WIDE_GRID = 512
"""Tokens up to which routing, and the sum of a token's products, have a program for each."""
SMALLEST, LEFT_OUT = -3.0e38, -3.2e38
"""Of logits and scores; of experts whose group is not kept, which are finite too: what has been taken is infinite."""
TINY = 1e-20
"""Added to sums that are divided by."""
_SMALLEST, _LEFT_OUT, _TINY = constant(SMALLEST), constant(LEFT_OUT), constant(TINY)
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_TOP = (constant(str(score)) for score in Score)


def route_reference(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None, padding: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    counts: torch.Tensor | None = None, own: range | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """logits [T, E], bias [E] float32 -> weights [T, k] float32 and experts [T, k] int32, best first.

    ``padding`` [T]: where it is negative there is no token, whose experts are -1 and whose weights are 0.
    ``logit_bias`` [E] float32 is added to the logits.
    ``counts`` [E] int32: to each is added how many tokens chose the expert; they wrap around.
    ``own``: only these experts are here. They are numbered from 0 on in what is returned, all others are -1 there.
    """
    logits = logits.float() if logit_bias is None else logits.float() + logit_bias
    logits = logits.nan_to_num(SMALLEST, -SMALLEST, SMALLEST).clamp(SMALLEST, -SMALLEST)
    scores = _scores(logits, routing.score)
    order = scores if bias is None else scores + bias
    order = order.clamp(SMALLEST, -SMALLEST)
    if routing.groups > 1:
        order = _keep_groups(order, routing)
    experts = order.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, experts)
    if routing.score is Score.SOFTMAX_OF_TOP:
        weights = torch.softmax(weights, 1)
    elif routing.renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + TINY)
    weights, experts = weights * routing.factor, experts.int()
    if padding is not None:
        absent = (padding < 0).unsqueeze(1)
        weights, experts = weights.masked_fill(absent, 0.0), experts.masked_fill(absent, -1)
    if counts is not None:
        chosen = experts.flatten().long()
        counts.add_(torch.bincount(chosen[chosen >= 0], minlength=len(counts)).int())
    if own is not None:
        experts = torch.where((experts >= own.start) & (experts < own.stop), experts - own.start, -1)
    return weights, experts


def _scores(logits: torch.Tensor, score: Score) -> torch.Tensor:
    if score is Score.SOFTMAX:
        return torch.softmax(logits, 1)
    return torch.sigmoid(logits) if score is Score.SIGMOID else logits


def _keep_groups(order: torch.Tensor, routing: Routing) -> torch.Tensor:
    """``order`` [T, E] with what is not in one of the best groups left out."""
    grouped = order.unflatten(1, (routing.groups, -1))
    best = grouped.sort(dim=2, descending=True).values[:, :, : routing.group_best].sum(2)
    kept = best.sort(dim=1, descending=True, stable=True).indices[:, : routing.keep_groups]
    out = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
    left: torch.Tensor = grouped.masked_fill(out.unsqueeze(2), LEFT_OUT).flatten(1)
    return left


@triton.jit
def _best(values, places):
    """The largest of each row of values [R, N] and its place; of several, the first."""
    largest = tl.max(values, axis=1)
    place = tl.min(tl.where(values == largest[:, None], places[None, :], 1 << 20), axis=1)
    return largest, place


@triton.jit
def _leave_out_groups(
    order, column, num_experts,
    GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, KEEP: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """``order`` [R, E] with what is in none of the best KEEP groups left out."""
    size = num_experts // GROUPS
    group, of_group = column // size, tl.arange(0, BLOCK_GROUPS)
    best = tl.full((order.shape[0], BLOCK_GROUPS), float("-inf"), tl.float32)
    for index in tl.static_range(GROUPS):
        within = tl.where((group == index)[None, :], order, float("-inf"))
        total, place = _best(within, column)
        if BEST == 2:
            total += tl.max(tl.where(column[None, :] == place[:, None], float("-inf"), within), axis=1)
        best = tl.where((of_group == index)[None, :], total[:, None], best)
    kept = tl.zeros(order.shape, tl.int32)
    for _ in tl.static_range(KEEP):
        _, chosen = _best(best, of_group)
        best = tl.where(of_group[None, :] == chosen[:, None], float("-inf"), best)
        kept = tl.where(group[None, :] == chosen[:, None], 1, kept)
    return tl.where((kept > 0) | (column >= num_experts)[None, :], order, _LEFT_OUT)


@triton.jit(do_not_specialize=["num_tokens", "first_own", "num_own"])
def _route_kernel(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E] float32 or None
    logit_bias_ptr,  # [E] float32 or None
    padding_ptr,  # [T] or None
    weights_ptr,  # [T, TOP_K] float32
    experts_ptr,  # [T, TOP_K] int32
    counts_ptr,  # [E] int32 or None
    stride_logits,
    num_tokens,
    num_experts,  # E
    first_own,  # of the experts that are here
    num_own,
    factor,
    SCORE: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # TOP_K rounded up
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    BEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # E rounded up
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column, choice = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < num_experts, other=0.0)[None, :]
    if logit_bias_ptr is not None:
        logit_bias = tl.load(logit_bias_ptr + column, mask=column < num_experts, other=0.0)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inside = (column < num_experts)[None, :]
    places = logits_ptr + token.to(tl.int64)[:, None] * stride_logits + column[None, :]
    logits = tl.load(places, mask=(token < num_tokens)[:, None] & inside, other=0.0).to(tl.float32)
    if logit_bias_ptr is not None:
        logits += logit_bias
    logits = tl.clamp(tl.where(logits == logits, logits, _SMALLEST), _SMALLEST, -_SMALLEST)
    logits = tl.where(inside, logits, float("-inf"))
    scores = logits
    if SCORE == _SOFTMAX:
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    if SCORE == _SIGMOID:
        power = tl.exp(-tl.abs(logits))
        scores = tl.where(logits < 0.0, power, 1.0) / (1.0 + power)
    order = scores
    if bias_ptr is not None:
        order = tl.clamp(scores + bias, _SMALLEST, -_SMALLEST)
    order = tl.where(inside, order, float("-inf"))
    if GROUPS > 1:
        order = _leave_out_groups(order, column, num_experts, GROUPS, BLOCK_GROUPS, KEEP, BEST)
    weights = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.float32)
    experts = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.int32)
    for index in tl.static_range(TOP_K):
        _, chosen = _best(order, column)
        taken = column[None, :] == chosen[:, None]
        weight = tl.sum(tl.where(taken, scores, 0.0), axis=1)
        order = tl.where(taken, float("-inf"), order)
        mine = (choice == index)[None, :]
        weights, experts = tl.where(mine, weight[:, None], weights), tl.where(mine, chosen[:, None], experts)
    if SCORE == _SOFTMAX_OF_TOP:
        among = (choice < TOP_K)[None, :]
        highest = tl.max(tl.where(among, weights, float("-inf")), axis=1)
        weights = tl.where(among, tl.exp(weights - highest[:, None]), 0.0)
        weights = weights / tl.sum(weights, axis=1)[:, None]
    elif RENORMALISE:
        weights = weights / (tl.sum(weights, axis=1) + _TINY)[:, None]
    weights *= factor
    if padding_ptr is not None:
        absent = (tl.load(padding_ptr + token, mask=token < num_tokens, other=0) < 0)[:, None]
        weights, experts = tl.where(absent, 0.0, weights), tl.where(absent, -1, experts)
    target = token[:, None] * TOP_K + choice[None, :]
    mask = (token < num_tokens)[:, None] & (choice < TOP_K)[None, :]
    tl.store(weights_ptr + target, weights, mask=mask)
    place = experts - first_own
    tl.store(experts_ptr + target, tl.where((place >= 0) & (place < num_own), place, -1), mask=mask)
    if counts_ptr is not None:  # whole numbers: the order of these does not matter
        tl.atomic_add(counts_ptr + experts, 1, mask=mask & (experts >= 0), sem="relaxed")


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None, padding: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    counts: torch.Tensor | None = None, own: range | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """logits [T, E], bias [E] float32 -> weights [T, k] float32 and experts [T, k] int32, best first.

    ``padding`` [T]: where it is negative there is no token, whose experts are -1 and whose weights are 0.
    ``logit_bias`` [E] float32 is added to the logits.
    ``counts`` [E] int32: to each is added how many tokens chose the expert; they wrap around.
    ``own``: only these experts are here. They are numbered from 0 on in what is returned, all others are -1 there.
    """
    (num_tokens, num_experts), device = logits.shape, logits.device
    routing.check(num_experts)
    assert logits.stride(1) == 1
    for each in (bias, logit_bias):
        assert each is None or (each.shape == (num_experts,) and each.dtype == torch.float32 and each.is_contiguous())
    assert padding is None or (len(padding) == num_tokens and padding.is_contiguous())
    weights = torch.empty((num_tokens, routing.top_k), dtype=torch.float32, device=device)
    experts = torch.empty((num_tokens, routing.top_k), dtype=torch.int32, device=device)
    if num_tokens == 0:
        return weights, experts
    own = range(num_experts) if own is None else own
    # A warp has a token: its maxima need no shared memory. The interpreter is faster with many tokens at once.
    block_rows = 16 if target_of(device) is None else 4 if num_tokens > WIDE_GRID else 1
    _route_kernel[(-(-num_tokens // block_rows),)](
        logits, bias, logit_bias, padding, weights, experts, counts, logits.stride(0), num_tokens, num_experts,
        own.start, len(own), routing.factor,
        SCORE=str(routing.score), RENORMALISE=routing.renormalise,
        TOP_K=routing.top_k, BLOCK_K=next_power_of_2(routing.top_k),
        GROUPS=routing.groups, BLOCK_GROUPS=next_power_of_2(routing.groups), KEEP=routing.keep_groups,
        BEST=routing.group_best, BLOCK_ROWS=block_rows, BLOCK=next_power_of_2(num_experts),
        num_warps=min(4, block_rows), **pdl(device),
    )  # fmt: skip
    return weights, experts
