"""Builds step plans: collects changes to the executor's persistent batch, then makes the message."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pagebus.actors.scheduler.kv.adapters import Adapters
from pagebus.actors.scheduler.replica.disk.orders import DiskOrders
from pagebus.actors.scheduler.replica.moves.orders import PullOrders
from pagebus.actors.scheduler.replica.slots import Slots, most_drafts
from pagebus.actors.scheduler.request import Sequence
from pagebus.actors.scheduler.states import State
from pagebus.bus.messages import Int32Array, NewSequence, SamplingParams, StepPlan
from pagebus.bus.messages.field_types import int_array, no_ints
from pagebus.bus.messages.steps import CONTEXT_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A plan whose result has not arrived: its rows [r], and those of them that sample [s]. ``drafts`` [s]: how many
    each of these verifies; None if there are none."""

    step: int
    slots: Slots
    ids: Int32Array
    sample_slots: Slots
    sample_ids: Int32Array
    drafts: Int32Array | None = None


class PlanBuilder:
    """Changes since the last plan of one replica. :meth:`build` makes the message and starts afresh. ``predicts``:
    whether sequences bring their predictions, since the executor looks drafts up."""

    def __init__(self, executor_epoch: int, adapters: Adapters, *, predicts: bool = False) -> None:
        self._executor_epoch = executor_epoch
        self._adapters = adapters
        self._predicts = predicts
        self.freed_slots: list[int] = []
        self._appended_slots: list[int] = []
        self._appended_blocks: list[int] = []
        self._appended_windowed: list[int] = []
        self._entering: list[Sequence] = []
        self._copies: list[tuple[list[int], list[int]]] = []
        self._cuts: dict[int, int] = {}
        self._chosen: dict[int, int] = {}
        self.rewritten: list[Sequence] = []
        """Sequences in the batch that take over another's tokens with the next plan."""
        self.swap_out_blocks: list[int] = []
        self.swap_out_hosts: list[int] = []
        self.swap_in_hosts: list[int] = []
        self.swap_in_blocks: list[int] = []
        self.disk = DiskOrders()
        self.pulled = PullOrders()

    def append(self, sequence: Sequence, blocks: list[int], windowed: list[int]) -> None:
        """Append new blocks to a sequence's table, and their ``windowed`` pages. A sequence that has not entered sends
        its whole table when it does."""
        sequence.blocks.extend(blocks)
        sequence.windowed.extend(windowed)
        if not sequence.entered:
            return
        if len(blocks) == 1:  # the usual case
            self._appended_slots.append(sequence.slot)
        else:
            self._appended_slots += [sequence.slot] * len(blocks)
        self._appended_blocks += blocks
        self._appended_windowed += windowed

    def swap_in(self, hosts: list[int], blocks: list[int]) -> None:
        """Copy these host blocks to these of the device."""
        self.swap_in_hosts += hosts
        self.swap_in_blocks += blocks

    def enter(self, sequence: Sequence) -> None:
        """Let the sequence enter the batch with this plan. No blocks may be appended to it afterwards."""
        sequence.become(State.ENTERED)
        if sequence.copied is not None:
            self._copies.append(sequence.copied)
        self._entering.append(sequence)

    def rewrite(self, sequence: Sequence, keep: int) -> None:
        """Replace the table of a sequence in the batch behind its first ``keep`` blocks. A block may be copied."""
        self.rewritten.append(sequence)
        if sequence.copied is not None:
            self._copies.append(sequence.copied)
        if keep < len(sequence.blocks):
            self._cuts[sequence.slot] = keep
            self._appended_slots += [sequence.slot] * (len(sequence.blocks) - keep)
            self._appended_blocks += sequence.blocks[keep:]
            self._appended_windowed += sequence.windowed[keep * len(sequence.windowed) // len(sequence.blocks) :]

    def choose(self, sequence: Sequence, token_id: int) -> None:
        """Set the last token of a sequence in the batch."""
        self._chosen[sequence.slot] = token_id

    def forget(self, sequence: Sequence) -> None:
        """Drop the pending changes of a sequence that leaves its slot."""
        slot = sequence.slot
        if slot not in self._chosen:
            return
        del self._chosen[slot]
        if sequence not in self.rewritten:
            return
        self.rewritten.remove(sequence)
        self._cuts.pop(slot, None)
        if sequence.copied is not None:
            self._copies.remove(sequence.copied)
        kept = [place for place, appended in enumerate(self._appended_slots) if appended != slot]
        each = len(self._appended_windowed) // max(1, len(self._appended_slots))
        self._appended_slots = [self._appended_slots[place] for place in kept]
        self._appended_blocks = [self._appended_blocks[place] for place in kept]
        pages = self._appended_windowed
        self._appended_windowed = [page for place in kept for page in pages[place * each : (place + 1) * each]]

    def build(
        self,
        step: int,
        now_s: float,
        num_decodes: int,
        slots: Slots,
        counts: Int32Array,
        earliest: Int32Array | None = None,
        latest: Int32Array | None = None,
        *,
        is_last: bool = False,
    ) -> StepPlan:
        """The plan with these rows, decodes first; ``earliest``, ``latest`` and ``is_last`` as in the message."""
        entering = self._entering
        predicted = [_predicted(each) if self._predicts else array("i") for each in entering]
        firsts = [0 if self._predicts else _first_token(each) for each in entering]
        plan = StepPlan(
            step=step,
            planned_s=now_s,
            num_decodes=num_decodes,
            new_sequences=tuple(map(_new_sequence, entering, map(len, predicted), firsts)),
            freed_slots=int_array(self.freed_slots),
            new_token_ids=_tokens(entering, firsts) if entering else no_ints(),
            new_block_ids=int_array(_blocks(entering)) if entering else no_ints(),
            appended_slots=int_array(self._appended_slots),
            appended_blocks=int_array(self._appended_blocks),
            copy_sources=int_array([source for sources, _ in self._copies for source in sources]),
            copy_targets=int_array([target for _, targets in self._copies for target in targets]),
            slots=slots.astype(np.int32),
            num_scheduled=counts,
            executor_epoch=self._executor_epoch,
            swap_out_blocks=int_array(self.swap_out_blocks),
            swap_out_hosts=int_array(self.swap_out_hosts),
            swap_in_hosts=int_array(self.swap_in_hosts),
            swap_in_blocks=int_array(self.swap_in_blocks),
            cut_slots=int_array(list(self._cuts)),
            cut_blocks=int_array(list(self._cuts.values())),
            chosen_slots=int_array(list(self._chosen)),
            chosen_tokens=int_array(list(self._chosen.values())),
            new_windowed=int_array([page for sequence in entering for page in sequence.windowed]),
            appended_windowed=int_array(self._appended_windowed),
            earliest_starts=no_ints() if earliest is None else earliest,
            latest_starts=no_ints() if latest is None else latest,
            new_predicted=int_array([token for each in predicted for token in each]),
            **self._adapters.columns(),
            **self.disk.columns(),
            **self.pulled.columns(),
            is_last=is_last,
        )
        self._begin_anew(step)
        return plan

    def drop_pulls(self) -> list[int]:
        """Let the next plan pull nothing. Returns the numbers of the pulls that it would have had."""
        dropped, self.pulled = self.pulled, PullOrders()
        return [each.pull for each in dropped.pulls]

    def _begin_anew(self, step: int) -> None:
        """Plan ``step`` is made: what the next one says is empty."""
        self.freed_slots, self._appended_slots, self._appended_blocks, self._entering, self._copies = [], [], [], [], []
        if self._appended_windowed:
            self._appended_windowed = []
        if self._chosen:
            self._cuts, self._chosen, self.rewritten = {}, {}, []
        if self.swap_out_blocks or self.swap_in_blocks:
            self.swap_out_blocks, self.swap_out_hosts, self.swap_in_hosts, self.swap_in_blocks = [], [], [], []
        if self.disk:
            self.disk = DiskOrders()
        if self.pulled:
            self.pulled = PullOrders()
        if self._adapters.has_news:
            self._adapters.planned(step)


def _first_token(sequence: Sequence) -> int:
    """The first token that the plan carries. Cached prompt tokens are left out if nothing reads their ids, because the
    60 kB of a long prompt take time to send. Output tokens are always sent, because a grammar follows them."""
    sampling = sequence.request.sampling
    if sampling.reads_past or sampling.scores_prompt or sequence.beam_group is not None or sequence.first_block:
        return 0
    return min(sequence.num_cached, len(sequence.request.prompt))


def _tokens(entering: list[Sequence], firsts: list[int]) -> Int32Array:
    """The tokens of all of them. A single sequence without output needs no copy, because its prompt never changes."""
    if len(entering) == 1 and len(entering[0].tokens) == len(entering[0].request.prompt):
        return np.frombuffer(entering[0].request.prompt, np.int32)[firsts[0] :]
    tokens = array("i")
    for sequence, first in zip(entering, firsts, strict=True):
        tokens += sequence.tokens[first:] if first else sequence.tokens
    return np.frombuffer(tokens, np.int32)


def _blocks(entering: list[Sequence]) -> list[int]:
    """The block tables of all of them."""
    blocks: list[int] = []
    for sequence in entering:
        blocks += sequence.blocks
    return blocks


def decodes_first(is_decode: NDArray[np.bool_]) -> NDArray[np.intp]:
    """A stable order of rows with all decodes in front."""
    return np.argsort(~is_decode, kind="stable")


def _predicted(sequence: Sequence) -> array[int]:
    """The prediction behind the prompt's last tokens, so that its beginning is found behind these."""
    request = sequence.request
    if not len(request.prediction) or not most_drafts(sequence, 1):
        return array("i")
    return request.prompt[-CONTEXT_TOKENS:] + request.prediction


def _new_sequence(sequence: Sequence, num_predicted: int, first_token: int) -> NewSequence:
    search = sequence.beam_group
    return NewSequence(
        sequence_id=sequence.id,
        slot=sequence.slot,
        num_tokens=len(sequence.tokens),
        num_prompt_tokens=len(sequence.request.prompt),
        num_computed_tokens=sequence.num_cached,
        num_blocks=len(sequence.blocks),
        first_block=sequence.first_block,
        first_windowed=sequence.first_windowed,
        max_total_tokens=sequence.limit,
        seed=sequence.seed,
        sampling=_sampling(sequence) if search is None else search.sampling,
        end_token_ids=sequence.request.end_token_ids if search is None else (),
        pooled_from=sequence.pooled_from,
        pooled_until=sequence.pooled_until,
        num_predicted=num_predicted,
        adapter=sequence.request.digest,
        first_token=first_token,
    )


def _sampling(sequence: Sequence) -> SamplingParams:
    """The request's parameters. Only one of its sequences reports on the prompt, and only once."""
    sampling = sequence.request.sampling
    if sampling.prompt_logprobs is None or sequence.scores_prompt:
        return sampling
    return replace(sampling, prompt_logprobs=None)
