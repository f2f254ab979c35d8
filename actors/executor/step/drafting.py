"""Speculation on the device: how long sequences are, which drafts are accepted, and what is drafted next.

A step begins with :meth:`Drafting.begin`, behind its upload, and ends with :meth:`Drafting.end`, behind its sampling.
All between them is as in any step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagebus.actors.executor.batch.buckets import Bucket
from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.batch.upload import Header
from pagebus.actors.executor.device.device import new_event
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.graphs.graphs import Graphs
from pagebus.actors.executor.memory.kv_cache import Cache
from pagebus.actors.executor.models import Model
from pagebus.actors.executor.models.decoder import as_decoder
from pagebus.actors.executor.models.draft_head import DraftHead
from pagebus.actors.executor.step.head_drafts import HeadDrafts
from pagebus.bus.messages import Int32Array


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ends of sequences that are looked up in what is before them: from the ``longest`` to the ``shortest``, in
    tokens."""

    longest: int
    shortest: int


class Drafting:
    """``lengths`` [S]: tokens of each slot, the last of which is never computed. ``found`` [S]: drafts behind them in
    the token table. ``predicted`` [S]: tokens of the text predicted for each, at the end of that table."""

    def __init__(
        self, ops: Ops, state: DeviceBatch, header: Header, limits: BatchLimits, lookup: Lookup, head: DraftHead | None,
        model: Model,
    ) -> None:  # fmt: skip
        """``head``: what drafts for the ``model`` in place of the lookup."""
        self._ops, self._state, self._header, self._lookup = ops, state, header, lookup
        self._num_drafts, self._vocab_size = limits.num_drafts, limits.vocab_size
        size, device = limits.layout.num_slots, state.tokens.device
        self.lengths = torch.ones(size, dtype=torch.int32, device=device)
        self.found = torch.zeros(size, dtype=torch.int32, device=device)
        self.predicted = torch.zeros(size, dtype=torch.int32, device=device)
        self._first_predicted = limits.first_predicted
        self.look_up = ops.look_up_drafts
        self.head: HeadDrafts | None = None
        if head is not None:
            self.head = HeadDrafts(head, as_decoder(model), ops, state, header, self.lengths, limits)

    def use(self, cache: Cache) -> None:
        """Go on with this cache."""
        if self.head is not None:
            self.head.use(cache.head)

    def begin(self, work: StepWork, deltas: dict[str, torch.Tensor], graphs: Graphs | None) -> None:
        """Note the sequences that enter, and those that plain steps have computed, let the head guess, and move the
        step's rows to where they begin. In a plain step, which looks up no drafts, there is nothing to do."""
        if work.runs is None:
            return
        header, rows, samples = self._header, len(work.slots), len(work.positions)
        if "entered_slots" in deltas:
            slots = deltas["entered_slots"].long()
            self.lengths[slots] = deltas["entered_lengths"]
            self.found[slots] = 0
            self.predicted[slots] = deltas["entered_predicted"]
        if "resumed_slots" in deltas:
            slots = deltas["resumed_slots"].long()
            self.lengths[slots] = deltas["resumed_lengths"]
            self.found[slots] = 0
        if self.head is not None:
            self.head.draft(work, graphs)
            if work.runs.told_drafts and not work.runs.are_single:
                work.runs.guess(self._fetched(deltas["run_slots"]))
        if work.runs.exact:
            return
        self._ops.resolve_starts(
            self.lengths, header.slots[:rows], header.starts[:rows], header.decode_lens[:rows],
            header.sample_slots[:samples], deltas["sample_starts"], header.positions[:samples],
            header.indexes[:samples], header.sample_lens[:samples],
        )  # fmt: skip

    def restore(self, work: StepWork, deltas: dict[str, torch.Tensor], input_ids: torch.Tensor) -> None:
        """Store the drafts again that plain sampling has overwritten in the extra rows: what is sampled there once more
        reads them as the sequence's past, and is then stored in their place."""
        if work.runs is None or work.runs.are_single:
            return
        header, rows = self._header, deltas["extra_rows"]
        columns = header.sample_slots, header.positions, header.hidden_index
        slots, positions, index = (column.index_select(0, rows) for column in columns)
        before = torch.where(positions > 0, positions - 1, -1)
        self._ops.store_sampled(self._state.tokens, slots, before, input_ids.index_select(0, index))

    def follow(self, work: StepWork, bucket: Bucket | None, graphs: Graphs | None) -> None:
        """In place of :meth:`end` where no row samples."""
        if self.head is not None:
            self.head.follow(work, bucket, graphs)

    def end(
        self, work: StepWork, deltas: dict[str, torch.Tensor], input_ids: torch.Tensor, sampled: torch.Tensor,
        bucket: Bucket | None, graphs: Graphs | None,
    ) -> torch.Tensor:  # fmt: skip
        """Accept and draft, but in a plain step. Returns the ``num_results`` numbers of the step, int32. ``bucket``:
        what it was padded to."""
        header, count = self._header, len(work.positions)
        if work.runs is None:
            if self.head is not None:
                self.lengths[header.sample_slots[:count].long()] = header.positions[:count] + 1
                if bucket is not None and self.head.follows:
                    sampled = sampled.clone()  # a graph of the head may write where that of the step has left them
                self.head.follow(work, bucket, graphs)
            return sampled
        slots = deltas["run_slots"]
        told = self._ops.accept_drafts(
            sampled, input_ids, header.hidden_index, header.indexes, deltas["run_starts"], slots, self.lengths,
            self.found, self._num_drafts, count,
        )  # fmt: skip
        ready = told[len(told) - len(work.runs) :]
        if self.head is not None:
            self.head.follow(work, bucket, graphs)
            ready.fill_(self._promised())
            self.found[slots.long()] = ready
        else:
            self.look_up(
                self._state.tokens, self.lengths, self.found, slots, self._num_drafts, self._lookup.shortest,
                self._lookup.longest, self._vocab_size, ready, self.predicted, self._first_predicted,
            )  # fmt: skip
        if not work.runs.told_drafts:
            return told
        return torch.cat(
            [told, self._drafts(slots) if self.head is None else told.new_zeros(len(slots) * self._num_drafts)]
        )

    def _promised(self) -> int:
        """How many drafts the head will have for each run, once its row asks for them."""
        return self._num_drafts

    def _fetched(self, slots: torch.Tensor) -> Callable[[], Int32Array]:
        """The drafts of the step that begins, of the sequences in slots [M]: they are on their way to the host, while
        the step is launched."""
        drafts = self._drafts(slots).view(len(slots), self._num_drafts)
        if not drafts.is_cuda:
            return drafts.numpy
        host, event = torch.empty(drafts.shape, dtype=torch.int32, pin_memory=True), new_event()
        host.copy_(drafts, non_blocking=True)
        event.record()

        def wait() -> Int32Array:
            event.synchronize()
            return host.numpy()

        return wait

    def _drafts(self, slots: torch.Tensor) -> torch.Tensor:
        """What stands behind the sequences in slots [M], drafts first, [M * num_drafts]: the host, which makes masks of
        grammars, has to know them."""
        places = self.lengths[slots].unsqueeze(1) + torch.arange(self._num_drafts, device=slots.device)
        return self._state.tokens[slots.unsqueeze(1), places].reshape(-1)
