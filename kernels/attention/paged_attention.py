"""Attention of a pass's new tokens over the paged cache: decode rows and prefill rows, each with its own kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagebus.kernels.attention import hopper_prefill
from pagebus.kernels.attention.cudnn_prefill import LongRow, cudnn_attention, takes_all
from pagebus.kernels.attention.decode import decode_attention
from pagebus.kernels.attention.decode_plan import DecodePlan, plan_decodes
from pagebus.kernels.attention.forms.choice import choose_form
from pagebus.kernels.attention.forms.form import USUAL, DecodeForm, DecodeHeads
from pagebus.kernels.attention.forms.launch import DecodeConfig, decode_config
from pagebus.kernels.attention.prefill import PrefillPlan, plan_prefills, prefill_attention
from pagebus.kernels.attention.prefill_plan import (
    Ints,
    PrefillConfig,
    QuerySpans,
    few_config,
    fixed_config,
    most_pieces,
    num_shares,
    packed_config,
    prefill_config,
    query_ranges,
    query_spans,
)
from pagebus.kernels.attention.reference import paged_attention_reference
from pagebus.kernels.common.int8 import check_scales
from pagebus.kernels.common.target import Target, num_multiprocessors, target_of
from pagebus.kernels.common.triton import next_power_of_2

__all__ = [
    "AttentionPlan",
    "AttentionShape",
    "Spans",
    "capability_of",
    "cut_prompts",
    "cut_prompts_invariant",
    "cut_prompts_reference",
    "graph_configs",
    "paged_attention",
    "paged_attention_invariant",
    "paged_attention_reference",
    "plan_attention",
    "plan_attention_invariant",
    "plan_attention_reference",
    "prompts_config",
]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of a model's attention: heads, their size, bytes per element of a query, windows (0: none)."""

    q_heads: int
    kv_heads: int
    head_dim: int
    element_size: int
    windows: frozenset[int] = frozenset({0})
    float8: bool = False
    """Whether the cache has one byte per element."""
    capability: int = 90
    """Of the GPU: 90 for sm_90."""
    run: int = 1
    """The most queries of a row with drafts, if such rows are computed as decodes are."""

    def shares(self, config: PrefillConfig, processors: int) -> int:
        """Into how many equal shares the keys of prompts are cut: heads of two KV heads never share a program."""
        return num_shares(config, max(self.kv_heads, -(-self.q_heads // config.heads)), processors)

    def pieces(self, config: PrefillConfig, processors: int) -> int:
        """The most pieces of keys that were cut for these heads, or for at least as many query heads of another
        model."""
        return most_pieces(num_shares(config, -(-self.q_heads // config.heads), processors))

    def form(self, num_rows: int, target: Target | None) -> DecodeForm:
        """The form in which this many decodes attend."""
        if self.element_size > 2:
            return USUAL
        heads = DecodeHeads(self.kv_heads, self.q_heads // self.kv_heads, self.head_dim, 1 if self.float8 else 2)
        return choose_form(num_rows, heads, target).form

    def decodes(self, processors: int, queries: int = 1, form: DecodeForm = USUAL) -> DecodeConfig:
        """The launch shape of decodes, or of runs of this many queries."""
        return decode_config(
            self.kv_heads, self.head_dim, self.element_size, processors, float8=self.float8,
            group=self.q_heads // self.kv_heads, queries=queries,
            small_memory=Target(self.capability, processors).small_memory, form=form,
        )  # fmt: skip

    def prompts(self, longest: int, context: int) -> PrefillConfig:
        """The launch shape of prompts, the ``longest`` with this many new tokens, and up to ``context`` in all."""
        return prefill_config(
            longest, context, self.head_dim, self.element_size, float8=self.float8, capability=self.capability
        )

    @property
    def packs_few(self) -> bool:
        """Whether there is a launch shape of its own for few tokens behind a long past (:meth:`few`)."""
        large = next_power_of_2(self.head_dim) > 128 or self.element_size > 2 or self.float8
        return self.capability // 10 == 9 and self.kv_heads < self.q_heads and not large and 0 in self.windows

    def few(self) -> PrefillConfig:
        """The launch shape of a step of at most FEW_TOKENS tokens: all heads that share keys read these together."""
        return few_config(self.prompts(0, 0), self.q_heads // self.kv_heads)

    def alone(self) -> PrefillConfig:
        """The launch shape for all rows of any pass in which a token's result depends on no other."""
        fixed = fixed_config(self.head_dim, self.element_size, float8=self.float8, capability=self.capability)
        return packed_config(fixed, self.q_heads // self.kv_heads)


@dataclass(frozen=True, slots=True)
class Spans:
    """`QuerySpans` on the device. In a pass of fixed shape they are padded with negative rows and empty merges."""

    config: PrefillConfig
    spans: torch.Tensor
    merges: torch.Tensor

    @classmethod
    def copied(cls, cut: QuerySpans, device: torch.device) -> Spans:
        return cls(cut.config, torch.from_numpy(cut.spans).to(device), torch.from_numpy(cut.merges).to(device))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The plan that all layers of a pass share: decodes by sliding window, and prompts in spans."""

    decodes: dict[int, DecodePlan]
    prefills: PrefillPlan | None = None
    runs: bool = False
    """Whether rows of a few queries each take the place of decodes, and there are no others."""


def capability_of(device: torch.device) -> int:
    """Of a GPU; on a CPU (the interpreter) launch shapes are those of 90."""
    target = target_of(device)
    return 90 if target is None else target.capability


def prompts_config(shape: AttentionShape, *, invariant: bool = False) -> PrefillConfig:
    """The launch shape for prompts of a pass whose lengths are unknown at launch; ``invariant``: for all rows of any
    pass, decodes included, so that a token's result does not depend on what it is computed with."""
    return shape.alone() if invariant else shape.prompts(0, 0)


def graph_configs(shape: AttentionShape, *, invariant: bool = False) -> dict[bool, PrefillConfig]:
    """Launch shapes of prompts in graphs, by whether these are for few tokens behind a long past."""
    few = {True: shape.few()} if shape.packs_few and not invariant else {}
    return {False: prompts_config(shape, invariant=invariant), **few}


def cut_prompts(
    query_start: Ints, context_lens: Ints, first_row: int, shape: AttentionShape, device: torch.device,
    most_spans: int | None = None, long_rows: Sequence[LongRow] = (), config: PrefillConfig | None = None,
) -> QuerySpans:  # fmt: skip
    """Cut the rows from first_row on, except the parts in ``long_rows``, into at most ``most_spans`` spans for
    ``device``; see `query_spans`. ``config``: the launch shape of a captured graph."""
    ranges = query_ranges(query_start, first_row, [_range_in_row(part, query_start) for part in long_rows])
    longest, context = (ranges[:, 2] - ranges[:, 1]).max(initial=0), context_lens[first_row:].max(initial=0)
    config = config or shape.prompts(int(longest), int(context))
    shares = shape.shares(config, num_multiprocessors(device))
    return query_spans(query_start, context_lens, ranges, config, shares, most_spans)


def _range_in_row(part: LongRow, query_start: Ints) -> tuple[int, int, int]:
    first = part.first_token - int(query_start[part.row])
    return part.row, first, first + part.num_queries


def cut_prompts_invariant(
    query_start: Ints, context_lens: Ints, first_row: int, shape: AttentionShape, device: torch.device,
    most_spans: int | None = None, long_rows: Sequence[LongRow] = (), config: PrefillConfig | None = None,
) -> QuerySpans:  # fmt: skip
    """Cut all rows, decodes included, so that a query's result does not depend on the rest of the pass: in one launch
    shape, without cutting keys."""
    assert not long_rows
    return query_spans(query_start, context_lens, query_ranges(query_start, 0), prompts_config(shape, invariant=True))


cut_prompts_reference = cut_prompts


def plan_attention(
    slots: torch.Tensor, context_lens: torch.Tensor, shape: AttentionShape, spans: Spans | None = None,
    *, query_start: torch.Tensor | None = None, settled: bool = True,
) -> AttentionPlan:  # fmt: skip
    """Make the plan that all layers of a pass share, of decodes with slots and context_lens [R], and prompts cut into
    ``spans``; with ``query_start`` [R + 1], of rows of at most ``shape.run`` queries each in place of decodes.

    To be made before all else in the pass: the kernels read it before they wait (`DecodePlan.settled`).
    """
    processors = num_multiprocessors(slots.device)
    prefills = None
    if spans is not None:
        pieces = shape.pieces(spans.config, processors)
        prefills = plan_prefills(spans.spans, spans.merges, spans.config, shape.q_heads, shape.head_dim, pieces)
    if not len(slots):
        return AttentionPlan({}, prefills)
    queries, form = (1, shape.form(len(slots), target_of(slots.device))) if query_start is None else (shape.run, USUAL)
    config = shape.decodes(processors, queries, form)
    decodes = {
        window: plan_decodes(
            slots, context_lens, shape.q_heads, shape.kv_heads, shape.head_dim, config, window, settled=settled,
            query_start=query_start, queries=queries,
        )
        for window in shape.windows
    }  # fmt: skip
    return AttentionPlan(decodes, prefills, query_start is not None)


def plan_attention_invariant(
    slots: torch.Tensor, context_lens: torch.Tensor, shape: AttentionShape, spans: Spans | None = None,
    *, query_start: torch.Tensor | None = None,
) -> AttentionPlan:  # fmt: skip
    """`plan_attention` of a pass whose decodes are among the ``spans``."""
    if spans is None:
        return AttentionPlan({})
    return AttentionPlan({}, plan_prefills(spans.spans, spans.merges, spans.config, shape.q_heads, shape.head_dim, 0))


def plan_attention_reference(
    slots: torch.Tensor, context_lens: torch.Tensor, shape: AttentionShape, spans: Spans | None = None,
    *, query_start: torch.Tensor | None = None,
) -> AttentionPlan:  # fmt: skip
    """An empty plan, because the reference needs none."""
    return AttentionPlan({})


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    num_decodes: int,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    decode_lens: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    long_rows: Sequence[LongRow] = (),
    projected: tuple[torch.Tensor, torch.Tensor] | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """Attention of new tokens over their sequences' cached tokens, themselves included (they are in the cache already).

    q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D] (views with any block and token stride; Hq a
    multiple of Hkv; any block_size); slots [R] int32; query_start [R + 1] int32; context_lens [R] int32, this pass's
    tokens included; block_tables [S, max_blocks] int32, row = slot. The first num_decodes rows have one query each; the
    others any number. Query i of n sees keys up to position context_len - n + i, and with a sliding_window only that
    many of them (0: all). With a softcap c a score s counts as c tanh(s / c) (0: as s). ``sinks`` [Hq] float32: beside
    its keys, a query of a head sees one with that score, and with zeros as its value. A float8 cache holds keys and
    values divided by kv_scales [2, Hkv] float32, which others do not have. -> [T, Hq, D], q's dtype, or `out` when
    given.

    Rows with context length 0 and tokens after query_start[R] give anything. Block ids past a row's context are never
    followed, negative ones read block 0.

    ``plan`` comes from `plan_attention`; without one the call makes its own, and waits for the device to learn how long
    prompts are. What ``long_rows`` holds, parts of rows after the decodes, is left to `cudnn_attention` or, if it is
    marked so, to `hopper_attention`; the plan was made without it. ``projected`` are keys and values [T, Hkv, D] of the
    new tokens, if they are at hand outside the cache. ``invariant``: a token's result has the same bits whatever the
    other rows are, and however many tokens of its own row are computed with it: decodes are prompts of one token, and
    num_decodes does not matter. A pass of fixed shape (a captured CUDA graph) learns on the device which rows are
    decodes: its plan was made of decode_lens [R] int32, the context length of each decode and 0 for other rows, which
    the reference is given here. num_decodes is then only an upper bound. With a plan of `runs` num_decodes is 0.
    """
    num_tokens, q_heads, head_dim = q.shape
    num_rows = slots.shape[0]
    num_decodes, long_rows = 0 if invariant else num_decodes, tuple(long_rows)
    _check_tensors(q, k_cache, v_cache, slots, query_start, context_lens, block_tables)
    check_scales(k_cache, kv_scales)
    check_sinks(sinks, q_heads)
    assert 0 <= num_decodes <= min(num_rows, num_tokens)
    assert decode_lens is None or plan is not None
    for_hopper = len(long_rows) > 0 and long_rows[0].for_hopper
    assert not long_rows or (not invariant and (for_hopper or (not sliding_window and not softcap and sinks is None)))
    if long_rows and not for_hopper and out is None and takes_all(long_rows, num_tokens):
        return cudnn_attention(q, k_cache, v_cache, None, slots, block_tables, scale, long_rows, kv_scales, projected)
    out = torch.empty((num_tokens, q_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    _check_result(out, q)
    if plan is None:
        shape = AttentionShape(
            q_heads, k_cache.shape[2], head_dim, q.element_size(), frozenset({sliding_window}),
            float8=kv_scales is not None, capability=capability_of(q.device),
        )  # fmt: skip
        plan = _own_plan(slots, query_start, context_lens, num_decodes, shape, long_rows, invariant=invariant)
    if num_decodes > 0 or plan.runs:
        decodes = plan.decodes[sliding_window]
        decode_attention(
            q, k_cache, v_cache, out, block_tables, scale, sliding_window, decodes, kv_scales=kv_scales,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
    if not plan.runs and (num_rows > num_decodes or decode_lens is not None):
        assert plan.prefills is not None
        prefill_attention(
            q, k_cache, v_cache, out, slots, query_start, context_lens, block_tables, scale, sliding_window,
            plan.prefills, kv_scales, softcap, sinks,
        )  # fmt: skip
    if for_hopper:
        hopper_prefill.hopper_attention(
            q, k_cache, v_cache, out, slots, block_tables, scale, long_rows, kv_scales, projected,
            sliding_window, softcap, sinks,
        )  # fmt: skip
    elif long_rows:  # after it: blocks of queries that begin before a part end inside
        cudnn_attention(q, k_cache, v_cache, out, slots, block_tables, scale, long_rows, kv_scales, projected)
    return out


def check_sinks(sinks: torch.Tensor | None, q_heads: int) -> None:
    """Check what kernels rely on."""
    assert sinks is None or (sinks.shape == (q_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())


def _check_tensors(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, query_start: torch.Tensor,
    context_lens: torch.Tensor, block_tables: torch.Tensor,
) -> None:  # fmt: skip
    """Check the shapes and strides that the kernels rely on."""
    assert k_cache.shape == v_cache.shape
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.shape[3] == q.shape[2]
    assert q.shape[1] % k_cache.shape[2] == 0
    assert q.stride(2) == 1
    assert k_cache.stride(3) == 1
    assert v_cache.stride(3) == 1
    assert block_tables.stride(1) == 1
    assert slots.shape == context_lens.shape == (len(query_start) - 1,)
    assert slots.is_contiguous()
    assert query_start.is_contiguous()
    assert context_lens.is_contiguous()


def _check_result(out: torch.Tensor, q: torch.Tensor) -> None:
    assert out.shape == q.shape
    assert out.stride(2) == 1


def _own_plan(
    slots: torch.Tensor, query_start: torch.Tensor, context_lens: torch.Tensor, num_decodes: int,
    shape: AttentionShape, long_rows: Sequence[LongRow], *, invariant: bool,
) -> AttentionPlan:  # fmt: skip
    """Make the plan of a single call."""
    spans = None
    if len(slots) > num_decodes:
        cut = cut_prompts_invariant if invariant else cut_prompts
        lengths = query_start.cpu().numpy(), context_lens.cpu().numpy()
        spans = Spans.copied(cut(*lengths, num_decodes, shape, slots.device, long_rows=long_rows), slots.device)
    decodes = slots[:num_decodes], context_lens[:num_decodes]
    if invariant:
        return plan_attention_invariant(*decodes, shape, spans)
    return plan_attention(*decodes, shape, spans, settled=False)


def paged_attention_invariant(*args: Any, **keywords: Any) -> torch.Tensor:
    """`paged_attention` with results independent of other tokens; the plan must come from
    `plan_attention_invariant`."""
    return paged_attention(*args, **keywords, invariant=True)
