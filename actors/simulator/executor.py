"""An executor as the scheduler sees it: plans in, results out, in the time that a profile says. No tokens are computed;
every sampled token is a number without meaning."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.actors.simulator.profile import Profile
from pagebus.bus.messages import END_LENGTH, END_NONE, END_STOP, Int32Array, NewSequence, StepPlan, StepResult
from pagebus.bus.messages.field_types import no_ints

_NO_SLOTS = np.empty(0, np.intp)
_NO_ENDS = np.full(16_384, END_NONE, np.int32)


class ModelExecutor:
    """The persistent batch of one device. Steps are executed in the order in which they are submitted.

    Args:
        output_tokens: how many tokens the model generates for a sequence id before it ends it.
    """

    def __init__(
        self, joined: ReplicaJoined, profile: Profile, output_tokens: Callable[[int], int], *, scheduler_epoch: int = 1
    ) -> None:
        self.joined = joined
        self._scheduler_epoch = scheduler_epoch
        self._output_tokens = output_tokens
        self._base_s = profile.base_table_s(max(joined.max_num_batched_tokens, joined.max_num_seqs))
        self._kv_token_s, self._pair_s = profile.kv_token_s, profile.pair_s
        self._pairs, self._has_windows = profile.pairs, profile.has_windows
        self._graph_tokens, self._eager_floor_s = profile.graph_tokens, profile.eager_floor_ms / 1e3
        block_bytes = profile.kv_bytes_per_token * joined.block_size / (1 + joined.windowed_pages)
        self._block_copy_s = block_bytes / profile.kv_read_bytes_per_s
        self._swap_s = block_bytes / profile.copy_bytes_per_s
        self._copies_free_s = 0.0
        self._copied_s: dict[int, float] = {}
        """When the copy of a device block is done, by block, while some may not be."""
        self._copies: deque[tuple[int, float]] = deque()
        """Steps whose copies may not be done, and when they are."""
        slots = joined.max_num_seqs
        self._ids = np.zeros(slots, np.int32)
        self._prompt = np.zeros(slots, np.int32)
        self._computed = np.zeros(slots, np.int32)
        self._total = np.zeros(slots, np.int32)
        self._limit = np.zeros(slots, np.int32)
        self._stop = np.zeros(slots, np.int32)

    def execute(self, plan: StepPlan, received_s: float, free_s: float) -> StepResult:
        """Execute a plan that came at ``received_s``, on a device that is free from ``free_s`` on. The result says when
        the step is done."""
        for new in plan.new_sequences:
            self._enter(new)
        seconds, sampled, num_tokens = self._compute(plan) if len(plan.slots) else (0.0, _NO_SLOTS, 0)
        if len(plan.copy_sources):
            seconds += len(plan.copy_sources) * self._block_copy_s
        if len(plan.swap_in_blocks) or len(plan.swap_out_blocks):
            self._copy(plan, received_s)
        if self._copied_s:
            free_s = max(free_s, self._needed_s(plan, received_s))
        done_s = (free_s if free_s > received_s else received_s) + seconds
        while self._copies and self._copies[0][1] <= done_s:
            self._copies.popleft()
        ids, indexes, ends = self._sample(sampled)
        num_drafts = np.full(len(ids), self.joined.num_drafts, np.int32) if self.joined.num_drafts else no_ints()
        return StepResult(
            step=plan.step,
            scheduler_epoch=self._scheduler_epoch,
            received_s=received_s,
            launched_s=received_s,
            done_s=done_s,
            busy_s=seconds,
            num_computed_tokens=num_tokens,
            sequence_ids=ids,
            token_ids=ids & 0x3FFF,
            token_indexes=indexes,
            ends=ends,
            copied_step=self._copies[0][0] - 1 if self._copies else plan.step,
            num_drafts=num_drafts,
        )

    def _compute(self, plan: StepPlan) -> tuple[float, NDArray[np.intp], int]:
        """How long the step's rows take, the slots that sample, and how many tokens it has."""
        slots, counts = plan.slots.astype(np.intp), plan.num_scheduled  # arrays are indexed faster by intp
        computed = self._computed[slots]
        computed += counts
        self._computed[slots] = computed
        if plan.num_decodes == len(slots):
            seconds = self._base_s[len(slots)] + self._read_tokens(computed) * self._kv_token_s
            return seconds, slots, len(slots)
        num_tokens = int(counts.sum())
        return self._mixed_s(plan, computed, num_tokens), slots[computed == self._total[slots]], num_tokens

    def _enter(self, new: NewSequence) -> None:
        slot = new.slot
        self._ids[slot] = new.sequence_id
        self._prompt[slot] = new.num_prompt_tokens
        self._computed[slot] = new.num_computed_tokens
        self._total[slot] = new.num_tokens
        self._limit[slot] = new.max_total_tokens
        self._stop[slot] = min(new.max_total_tokens, new.num_prompt_tokens + self._output_tokens(new.sequence_id))

    def _mixed_s(self, plan: StepPlan, computed: Int32Array, num_tokens: int) -> float:
        """A step with prompts in it. A row of n tokens that reaches position c attends to n * (c - n + 1) + ... pairs;
        its keys and values are read once, which counts little beside them."""
        decodes = plan.num_decode_rows
        counts = plan.num_scheduled[decodes:].astype(np.float64)
        pairs, read = float(self._pairs(counts, computed[decodes:]).sum()), self._read_tokens(computed[:decodes])
        seconds = self._base_s[num_tokens] + read * self._kv_token_s + pairs * self._pair_s
        return max(seconds, self._eager_floor_s) if num_tokens > self._graph_tokens else seconds

    def _read_tokens(self, computed: Int32Array) -> float:
        """Of decodes: how many tokens' keys and values are read, each counted as all layers' share of it."""
        return float(self._pairs(1, computed).sum()) if self._has_windows else int(computed.sum())

    def _copy(self, plan: StepPlan, received_s: float) -> None:
        """Copies between the tiers have a queue of their own, beside the computing: out, then in, one after another."""
        at_s = max(self._copies_free_s, received_s)
        for block in chain(plan.swap_out_blocks.tolist(), plan.swap_in_blocks.tolist()):
            at_s += self._swap_s
            self._copied_s[block] = at_s
        self._copies_free_s = at_s
        self._copies.append((plan.step, at_s))

    def _needed_s(self, plan: StepPlan, received_s: float) -> float:
        """When the step may begin: once the copies of blocks that are new in a block table with it are done."""
        if self._copies_free_s <= received_s:
            self._copied_s.clear()
            return 0.0
        copied_s = self._copied_s
        new = plan.new_block_ids, plan.appended_blocks, plan.copy_sources, plan.new_windowed, plan.appended_windowed
        pages = chain.from_iterable(each.tolist() for each in new)
        return max((copied_s.get(page, 0.0) for page in pages), default=0.0)

    def _sample(self, slots: NDArray[np.intp]) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Ids, token indexes and ends of the rows that sample. A sequence that has ended has no more rows."""
        total = self._total[slots]
        indexes = total - self._prompt[slots]
        total += 1
        self._total[slots] = total
        stop = self._stop[slots]
        over = total >= stop
        if not np.count_nonzero(over):
            return self._ids[slots], indexes, _NO_ENDS[: len(slots)]
        ends = np.where(over, np.where(total >= self._limit[slots], END_LENGTH, END_STOP), END_NONE).astype(np.int32)
        late = total > stop
        if np.count_nonzero(late):
            keep = ~late
            return self._ids[slots[keep]], indexes[keep], ends[keep]
        return self._ids[slots], indexes, ends
