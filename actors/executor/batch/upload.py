"""The upload of a step: everything that the device needs, packed into one int32 buffer.

The buffer begins with a header of fixed layout: rows of ``width`` ints each, then, in a step with prompts, their
division for attention. On CUDA it is always at the same device address, because captured graphs read it there. The tail
follows: the step's deltas, one after another, each aligned to 16 bytes. The host side is a ring of pinned buffers, so
that one step can still be copied while the next is packed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pagebus.actors.executor.batch.buckets import Bucket
from pagebus.actors.executor.batch.layout import aligned
from pagebus.actors.executor.batch.logprob_rows import LogprobRows
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.agreement import WORDS
from pagebus.actors.executor.device.device import new_event
from pagebus.bus.messages import Int32Array
from pagebus.kernels.attention.prefill_plan import MERGE_FIELDS, SPAN_FIELDS, QuerySpans

(
    SLOTS, STARTS, QUERY_START, DECODE_LENS, SAMPLE_SLOTS, HIDDEN_INDEX, SAMPLE_LENS, POSITIONS, INDEXES, MASK_PLACES,
    PART_FIRSTS, PART_COUNTS,
) = range(12)  # fmt: skip
NUM_ROWS = 12
COPY_INTS = 1024
"""Copies to the device are multiples of it."""


@dataclass(slots=True)
class Header:
    """Views of the header on the device. ``agreed`` [3] is what ranks tell each other. ``merges`` [M, 4] and ``spans``
    [N, 5] are for steps with prompts, and so are ``hidden_index`` and ``sample_lens`` (context lengths);
    ``decode_lens`` is for those of them that are padded to a bucket. ``mask_places`` is for steps with rows that
    follow a grammar: which of the step's masks each row has, -1 for none. ``part_firsts`` and ``part_counts`` are
    the parts of prompts that are pooled. All but the first three have room for every slot: four are by row of the
    pass (use the first R), six by sampled token (the first N), two by part (the first p)."""

    agreed: torch.Tensor
    merges: torch.Tensor
    spans: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    query_start: torch.Tensor
    decode_lens: torch.Tensor
    sample_slots: torch.Tensor
    hidden_index: torch.Tensor
    sample_lens: torch.Tensor
    positions: torch.Tensor
    indexes: torch.Tensor
    mask_places: torch.Tensor
    part_firsts: torch.Tensor
    part_counts: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the pooled parts begin, and how many tokens they have."""
        return self.part_firsts, self.part_counts


@dataclass(slots=True)
class _HostBuffer:
    """``copied``: when it may be packed anew, unless that is known. ``copies``: where to and from, by size."""

    tensor: torch.Tensor
    array: Int32Array
    copied: torch.cuda.Event | None
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Uploader:
    """Packs and sends uploads. ``tail_ints`` is the usual size of a tail; a larger one gets a separate buffer.

    Args:
        max_spans, max_merges: the most of a step or a bucket.
        max_samples: the most tokens that a step samples, if these may be more than its rows.

    On a CPU the kernels read the host buffer itself, without a copy. On the meta device nothing is copied, as it has no
    memory.
    """

    def __init__(
        self,
        device: torch.device,
        max_num_seqs: int,
        tail_ints: int,
        num_buffers: int,
        *,
        max_spans: int = 0,
        max_merges: int = 0,
        max_samples: int = 0,
    ) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._width = aligned(max(max_num_seqs, max_samples) + 2)
        self._dummy_slot = max_num_seqs
        self._row_ints = NUM_ROWS * self._width
        self._merges_begin = self._row_ints + aligned(WORDS)
        self._spans_begin = self._merges_begin + MERGE_FIELDS * max_merges
        spans_end = self._spans_begin + SPAN_FIELDS * max_spans
        self._capacity = aligned(spans_end) + aligned(tail_ints)
        self._ring = [self._host_buffer() for _ in range(num_buffers if self._cuda else 1)]
        self._next = 0
        first = self._ring[0].tensor
        on_host = device.type == "cpu"
        self._target = first if on_host else torch.zeros(self._capacity, dtype=torch.int32, device=device)
        rows = self._target[: self._row_ints].view(NUM_ROWS, self._width)
        merges = self._target[self._merges_begin : self._spans_begin].view(-1, MERGE_FIELDS)
        spans = self._target[self._spans_begin : spans_end].view(-1, SPAN_FIELDS)
        agreed = self._target[self._row_ints :][:WORDS]
        self.header = Header(agreed, merges, spans, *(rows[row] for row in range(NUM_ROWS)))

    @property
    def num_buffers(self) -> int:
        """How many steps can be under way without one waiting for another's buffer."""
        return len(self._ring)

    def _host_buffer(self) -> _HostBuffer:
        tensor = torch.zeros(self._capacity, dtype=torch.int32, pin_memory=self._cuda)
        return _HostBuffer(tensor, tensor.numpy(), new_event() if self._cuda else None)

    def trust_limit(self) -> None:
        """From now on no more steps are in flight than there are buffers: none has to be waited for."""
        for buffer in self._ring:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            buffer.copied = None

    def send(self, work: StepWork, bucket: Bucket | None, cut: QuerySpans | None = None) -> dict[str, torch.Tensor]:
        """Send header and deltas of ``work``, whose prompts are ``cut``; rows from R up to those of ``bucket`` are rows
        of nothing (dummy slot), spans and merges beyond those there are also.

        Returns the deltas on the device, by name. The header is in :attr:`header`.
        """
        buffer = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        rows = buffer.array[: self._row_ints].reshape(NUM_ROWS, self._width)
        _pack_rows(rows, work)
        if bucket is not None and bucket.rows > min(len(work.slots), len(work.positions)):
            _pad_rows(rows, work, bucket.rows, self._dummy_slot)
        _pack_parts(rows, work.logprob_rows, 0 if bucket is None else bucket.rows)
        num_spans = bucket.spans if bucket is not None else 0 if cut is None else len(cut.spans)
        if work.agreed is not None:
            buffer.array[self._row_ints :][:WORDS] = work.agreed
        header_ints = self._pack_spans(buffer.array, cut, num_spans) if num_spans else self._merges_begin
        tail_ints = sum(aligned(len(values)) for values in work.deltas.values())
        fits = header_ints + tail_ints <= self._capacity
        if fits:
            offsets = _pack_tail(buffer.array, header_ints, work.deltas)
            used = header_ints + tail_ints
        else:
            used = header_ints
        if self._cuda:
            self._copy(buffer, used)
        if fits:
            return {name: self._target[start:end] for name, (start, end) in offsets.items()}
        return self._send_apart(work.deltas, tail_ints)

    def _copy(self, buffer: _HostBuffer, used: int) -> None:
        """Copy the first ``used`` ints to the device, or a few more: so there are few sizes, and views of each are kept
        (to make one takes as long as to begin the copy)."""
        size = min(-(-used // COPY_INTS) * COPY_INTS, self._capacity)
        if (copy := buffer.copies.get(size)) is None:
            copy = buffer.copies[size] = self._target[:size], buffer.tensor[:size]
        target, source = copy
        target.copy_(source, non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()

    def _send_apart(self, deltas: dict[str, Int32Array], tail_ints: int) -> dict[str, torch.Tensor]:
        """A tail too large for the ring: a buffer made for it, which torch keeps until the copy is done."""
        host = torch.empty(tail_ints, dtype=torch.int32, pin_memory=self._cuda)
        offsets = _pack_tail(host.numpy(), 0, deltas)
        tail = host.to(self._device, non_blocking=True)
        return {name: tail[start:end] for name, (start, end) in offsets.items()}

    def _pack_spans(self, target: Int32Array, cut: QuerySpans | None, num_spans: int) -> int:
        """Write merges and ``num_spans`` spans; returns where they end, aligned."""
        end: int = self._spans_begin + SPAN_FIELDS * num_spans
        merges = target[self._merges_begin : self._spans_begin].reshape(-1, MERGE_FIELDS)
        spans = target[self._spans_begin : end].reshape(-1, SPAN_FIELDS)
        merges[:] = 0
        spans[:, 0] = -1
        if cut is not None:
            merges[: len(cut.merges)] = cut.merges
            spans[: len(cut.spans)] = cut.spans
        return aligned(end)


def _pack_rows(rows: Int32Array, work: StepWork) -> None:
    num_rows, num_decodes, num_sampled = len(work.slots), work.num_decodes, len(work.positions)
    rows[SLOTS, :num_rows] = work.slots
    rows[STARTS, :num_rows] = work.starts
    rows[QUERY_START, : num_rows + 1] = work.query_start
    rows[SAMPLE_SLOTS, :num_sampled] = work.sample_slots
    rows[POSITIONS, :num_sampled] = work.positions
    rows[INDEXES, :num_sampled] = work.indexes
    if len(work.constrained):
        rows[MASK_PLACES, :num_sampled] = -1
        rows[MASK_PLACES, work.constrained] = np.arange(len(work.constrained))
    if work.decode_only:
        return  # the others are for steps with prompts
    rows[DECODE_LENS, :num_decodes] = work.starts[:num_decodes] + 1
    rows[DECODE_LENS, num_decodes:num_rows] = 0
    rows[HIDDEN_INDEX, :num_sampled] = work.hidden_index
    rows[SAMPLE_LENS, :num_sampled] = work.context_lens


def _pad_rows(rows: Int32Array, work: StepWork, padded_rows: int, dummy_slot: int) -> None:
    """Rows and samples of nothing."""
    beyond, unsampled = slice(len(work.slots), padded_rows), slice(len(work.positions), padded_rows)
    rows[SLOTS, beyond] = dummy_slot
    rows[STARTS, beyond] = 0
    # No tokens: context length 0, so attention reads nothing and the KV write is skipped.
    rows[QUERY_START, len(work.slots) + 1 : padded_rows + 1] = work.query_start[-1]
    rows[DECODE_LENS, beyond] = 0
    rows[SAMPLE_SLOTS, unsampled] = dummy_slot
    rows[HIDDEN_INDEX, unsampled] = 0
    rows[SAMPLE_LENS, unsampled] = 0
    rows[POSITIONS, unsampled] = -1
    rows[INDEXES, unsampled] = 0
    rows[MASK_PLACES, unsampled] = -1


def _pack_parts(rows: Int32Array, requested: LogprobRows | None, padded_parts: int) -> None:
    """Parts that are pooled, behind them empty ones."""
    num_parts = 0 if requested is None else len(requested.pooled)
    if requested is not None:
        rows[PART_FIRSTS, :num_parts] = requested.pooled_firsts
        rows[PART_COUNTS, :num_parts] = requested.pooled_lengths
    rows[PART_COUNTS, num_parts:padded_parts] = 0


def _pack_tail(target: Int32Array, start: int, deltas: dict[str, Int32Array]) -> dict[str, tuple[int, int]]:
    """Copy each delta to an aligned place; returns (start, end) of each."""
    offsets = {}
    for name, values in deltas.items():
        end = start + len(values)
        target[start:end] = values
        offsets[name] = (start, end)
        start = aligned(end)
    return offsets


def tail_capacity(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Ints that the deltas of nearly every step fit in: twice (place, value) per token of the budget, and columns."""
    return 4 * max_num_batched_tokens + 32 * max_num_seqs + np.iinfo(np.uint16).max
