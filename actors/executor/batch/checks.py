"""Checks of step plans on the CPU. What passes here can neither fault a kernel nor touch another sequence's memory.

A plan that fails is an error of the scheduler: each check raises :class:`PlanError` naming field, slot and numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagebus.actors.executor.device.errors import PlanError
from pagebus.actors.model.window import Window
from pagebus.bus.messages import Int32Array, NewSequence, StepPlan
from pagebus.bus.messages.segments import without_segments
from pagebus.bus.messages.steps import MOST_PREDICTED_TOKENS

if TYPE_CHECKING:
    from pagebus.actors.executor.batch.layout import BatchLimits


def _in_range(field: str, values: Int32Array, end: int) -> None:
    """All of ``values`` lie in [0, end)."""
    if len(values) and np.maximum.reduce(values.view(np.uint32)) >= end:  # negative ones are the largest there
        bad = int(values[(values < 0) | (values >= end)][0])
        raise PlanError(f"{field} holds {bad}, which is not in [0, {end})")


def _same_length(name_a: str, a: Int32Array, name_b: str, b: Int32Array) -> None:
    if len(a) != len(b):
        raise PlanError(f"{name_a} has {len(a)} entries, {name_b} {len(b)}")


def occupied_slots(field: str, slots: Int32Array, sequence_ids: Int32Array) -> None:
    """``slots`` are distinct and each holds a sequence. The last of ``sequence_ids`` is the dummy slot's."""
    num_slots = len(sequence_ids) - 1
    _in_range(field, slots, num_slots)
    if np.count_nonzero(slots[1:] > slots[:-1]) < len(slots) - 1:  # they ascend in most plans
        counts = np.bincount(slots, minlength=num_slots)
        if counts.max() > 1:
            raise PlanError(f"{field} names slot {int(counts.argmax())} twice")
    _occupied(field, slots, sequence_ids)


def _occupied(field: str, slots: Int32Array, sequence_ids: Int32Array) -> None:
    ids = sequence_ids.take(slots)
    if np.count_nonzero(ids) < len(ids):
        raise PlanError(f"{field} names slot {int(slots[ids == 0][0])}, which is empty")


def new_sequences(plan: StepPlan, limits: BatchLimits, sequence_ids: Int32Array) -> None:
    """Every sequence fits its slot and the limits, and the arrays hold exactly their tokens and blocks."""
    taken: set[int] = set()
    for new in plan.new_sequences:
        _new_sequence(new, limits)
        if new.slot in taken or sequence_ids[new.slot]:
            raise PlanError(f"new sequence {new.sequence_id}: slot {new.slot} is taken")
        taken.add(new.slot)
    for field, array, declared in (
        ("new_token_ids", plan.new_token_ids, sum(new.num_tokens - new.first_token for new in plan.new_sequences)),
        ("new_block_ids", plan.new_block_ids, sum(new.num_blocks for new in plan.new_sequences)),
        ("new_windowed", plan.new_windowed, limits.windowed_pages * sum(map(_num_windowed, plan.new_sequences))),
        ("new_predicted", plan.new_predicted, sum(new.num_predicted for new in plan.new_sequences)),
    ):
        if len(array) != declared:
            raise PlanError(f"{field} has {len(array)} entries, the new sequences need {declared}")
    segmented = any(new.sampling.in_one_step for new in plan.new_sequences)
    ids = without_segments(plan.new_token_ids) if segmented else plan.new_token_ids
    _in_range("new_token_ids", ids, limits.vocab_size)
    _in_range("new_predicted", plan.new_predicted, limits.vocab_size)
    _in_range("new_block_ids", plan.new_block_ids, limits.num_blocks)
    _in_range("new_windowed", plan.new_windowed, limits.num_blocks)


def _num_windowed(new: NewSequence) -> int:
    """Blocks of which a sequence has windowed pages, where there are any."""
    return new.first_block + new.num_blocks - new.first_windowed


def _new_sequence(new: NewSequence, limits: BatchLimits) -> None:
    who = f"new sequence {new.sequence_id}"
    if not 0 < new.sequence_id < 2**31:
        raise PlanError(f"{who}: ids are from 1 to 2^31 - 1")
    if not 0 <= new.slot < limits.max_num_seqs:
        raise PlanError(f"{who}: slot {new.slot} is not in [0, {limits.max_num_seqs})")
    if not new.num_tokens < new.max_total_tokens <= limits.max_model_len:
        raise PlanError(
            f"{who}: {new.num_tokens} tokens of at most {new.max_total_tokens} do not fit "
            f"max_model_len {limits.max_model_len}"
        )
    if not 1 <= new.num_prompt_tokens <= new.num_tokens:
        raise PlanError(f"{who}: {new.num_prompt_tokens} prompt tokens of {new.num_tokens}")
    if not 0 <= new.num_computed_tokens < new.num_tokens:
        raise PlanError(f"{who}: {new.num_computed_tokens} tokens computed of {new.num_tokens}")
    if not 0 <= new.first_token <= min(new.num_computed_tokens, new.num_prompt_tokens):
        raise PlanError(
            f"{who}: {new.num_computed_tokens} tokens computed, {new.num_prompt_tokens} of the prompt, but the first "
            f"{new.first_token} are not said"
        )
    if not 0 <= new.num_predicted <= (MOST_PREDICTED_TOKENS if limits.num_drafts else 0):
        raise PlanError(f"{who}: {new.num_predicted} predicted tokens, at most {MOST_PREDICTED_TOKENS} and with drafts")
    _table(who, new, limits)


def _table(who: str, new: NewSequence, limits: BatchLimits) -> None:
    """The blocks hold all computed tokens but those behind the window of the next one."""
    first, end = new.first_block, new.first_block + new.num_blocks
    if not 0 <= new.num_blocks <= end <= limits.table_width:
        raise PlanError(f"{who}: {new.num_blocks} blocks from {first} on, at most {limits.table_width} fit")
    if new.num_computed_tokens > end * limits.block_size:
        raise PlanError(f"{who}: {new.num_computed_tokens} computed tokens in {end} blocks")
    if first > Window(limits.window, limits.block_size).first_block(new.num_computed_tokens):
        raise PlanError(f"{who}: token {new.num_computed_tokens} sees tokens before block {first}, its first")
    first = new.first_windowed
    seen = Window(limits.windowed_tokens, limits.block_size).first_block(new.num_computed_tokens)
    if not 0 <= first <= min(end, seen):
        raise PlanError(f"{who}: token {new.num_computed_tokens} sees windowed pages before block {first}, their first")


def appended_blocks(plan: StepPlan, sequence_ids: Int32Array, limits: BatchLimits) -> None:
    """A slot may get several blocks at once; each must hold a sequence."""
    slots, blocks, windowed = plan.appended_slots, plan.appended_blocks, plan.appended_windowed
    _same_length("appended_slots", slots, "appended_blocks", blocks)
    if len(windowed) != limits.windowed_pages * len(slots):
        raise PlanError(f"appended_windowed has {len(windowed)} entries for {len(slots)} blocks")
    _in_range("appended_slots", slots, len(sequence_ids) - 1)
    _in_range("appended_blocks", blocks, limits.num_blocks)
    _in_range("appended_windowed", windowed, limits.num_blocks)
    _occupied("appended_slots", slots, sequence_ids)


def cut_blocks(plan: StepPlan, sequence_ids: Int32Array, num_blocks: Int32Array) -> None:
    """``num_blocks`` are those of each slot: a table can only become shorter."""
    _same_length("cut_slots", plan.cut_slots, "cut_blocks", plan.cut_blocks)
    occupied_slots("cut_slots", plan.cut_slots, sequence_ids)
    wrong = (plan.cut_blocks < 0) | (plan.cut_blocks > num_blocks[plan.cut_slots])
    if wrong.any():
        row = int(wrong.argmax())
        slot, keep = int(plan.cut_slots[row]), int(plan.cut_blocks[row])
        raise PlanError(f"cut_blocks keeps {keep} of slot {slot}'s {int(num_blocks[slot])} blocks")


def chosen_tokens(plan: StepPlan, limits: BatchLimits, sequence_ids: Int32Array, num_tokens: Int32Array) -> None:
    """Each slot's last token has a place, and the vocabulary has the chosen one."""
    _same_length("chosen_slots", plan.chosen_slots, "chosen_tokens", plan.chosen_tokens)
    occupied_slots("chosen_slots", plan.chosen_slots, sequence_ids)
    _in_range("chosen_tokens", plan.chosen_tokens, limits.vocab_size)
    _in_range("last tokens", num_tokens[plan.chosen_slots] - np.int32(1), limits.max_model_len)


def copies(plan: StepPlan, num_blocks: int) -> None:
    """Both ends of a block copy exist."""
    _same_length("copy_sources", plan.copy_sources, "copy_targets", plan.copy_targets)
    _in_range("copy_sources", plan.copy_sources, num_blocks)
    _in_range("copy_targets", plan.copy_targets, num_blocks)


def swaps(plan: StepPlan, num_blocks: int, num_host_blocks: int) -> None:
    """Both ends of every copy between the tiers exist."""
    _same_length("swap_out_blocks", plan.swap_out_blocks, "swap_out_hosts", plan.swap_out_hosts)
    _same_length("swap_in_hosts", plan.swap_in_hosts, "swap_in_blocks", plan.swap_in_blocks)
    _in_range("swap_out_blocks", plan.swap_out_blocks, num_blocks)
    _in_range("swap_in_blocks", plan.swap_in_blocks, num_blocks)
    _in_range("swap_out_hosts", plan.swap_out_hosts, num_host_blocks)
    _in_range("swap_in_hosts", plan.swap_in_hosts, num_host_blocks)


def disk(plan: StepPlan, num_host_blocks: int) -> None:
    """The host blocks of orders to the disk exist, one for each name."""
    for names, column, hosts in (
        (plan.disk_reads, "disk_read_hosts", plan.disk_read_hosts),
        (plan.disk_writes, "disk_write_hosts", plan.disk_write_hosts),
    ):
        if len(names) != len(hosts):
            raise PlanError(f"{column} has {len(hosts)} entries for {len(names)} names")
        _in_range(column, hosts, num_host_blocks)


def pulls(plan: StepPlan, num_blocks: int) -> None:
    """Each pull has its blocks, and has them to itself. Whether the sources exist only the pull itself can tell."""
    _same_length("pull_sources", plan.pull_sources, "pull_blocks", plan.pull_blocks)
    least, total = min((each.num_blocks for each in plan.pulls), default=1), sum(each.num_blocks for each in plan.pulls)
    if least < 1 or total != len(plan.pull_blocks):
        raise PlanError(f"pull_blocks has {len(plan.pull_blocks)} entries, the pulls need {total}, at least 1 each")
    _in_range("pull_blocks", plan.pull_blocks, num_blocks)
    _in_range("pull_sources", plan.pull_sources, 2**31 - 1)
    ordered = np.sort(plan.pull_blocks)  # a tenth of the time that np.unique takes
    if np.count_nonzero(ordered[1:] == ordered[:-1]):
        raise PlanError("pull_blocks names a block twice")


def row_slots(plan: StepPlan, limits: BatchLimits, sequence_ids: Int32Array) -> None:
    """Rows name distinct, occupied slots, decodes are among them, and the token budget is kept."""
    _same_length("slots", plan.slots, "num_scheduled", plan.num_scheduled)
    occupied_slots("slots", plan.slots, sequence_ids)
    num_rows = total = len(plan.slots)
    if np.count_nonzero(plan.num_scheduled == 1) < num_rows:
        total = int(plan.num_scheduled.sum(dtype=np.int64))
        least = int(plan.num_scheduled.min())
        if least < 1:
            raise PlanError(f"num_scheduled is {least} for slot {int(plan.slots[plan.num_scheduled.argmin()])}")
    if total > limits.max_num_batched_tokens:
        raise PlanError(f"{total} tokens are scheduled, the budget is {limits.max_num_batched_tokens}")
    if not 0 <= plan.num_decodes <= len(plan.slots):
        raise PlanError(f"num_decodes is {plan.num_decodes} in a plan of {len(plan.slots)} rows")


def row_lengths(
    plan: StepPlan, limits: BatchLimits, ends: Int32Array, known: Int32Array, num_blocks: Int32Array
) -> None:
    """Rows compute known tokens into existing blocks.

    ``ends``, ``known`` and ``num_blocks`` [R]: computed tokens after the step, tokens before it, blocks.
    """
    room = num_blocks * limits.block_size
    if np.count_nonzero(ends > np.minimum(np.minimum(known, room), limits.max_model_len)):
        for what, wrong in (
            ("computes beyond its last token", ends > known),
            ("computes beyond max_model_len", ends > limits.max_model_len),
            ("computes beyond its last block", ends > room),
        ):
            if wrong.any():
                row = int(wrong.argmax())
                raise PlanError(
                    f"slot {int(plan.slots[row])} {what}: up to token {int(ends[row])} "
                    f"of {int(known[row])}, with {int(num_blocks[row])} blocks of {limits.block_size}"
                )
    count = plan.num_decodes
    wrong = (plan.num_scheduled[:count] != 1) | (ends[:count] != known[:count])
    if np.count_nonzero(wrong):
        row = int(wrong.argmax())
        raise PlanError(f"row {row} (slot {int(plan.slots[row])}) is counted as a decode but is none")
