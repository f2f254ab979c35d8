"""What a plan says of beams: shorter tables, other blocks behind them, another last token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.results import ResultBuilder
from pagebus.actors.executor.device.errors import PlanError
from pagebus.actors.executor.device.ops import Ops
from pagebus.bus.messages import END_LENGTH, StepPlan
from tests.actors.executor.batch_plans import LIMITS, entering, new, plan, running
from tests.helpers.engine_driver import ints


def on_device(batch: PersistentBatch, state: DeviceBatch, step: StepPlan) -> None:
    """Apply a plan to both sides of a batch."""
    work = batch.apply(step)
    state.apply({name: torch.from_numpy(values) for name, values in work.deltas.items()})


def test_a_beam_takes_over_anothers_table_and_a_token() -> None:
    """The first blocks stay, the others are the other beam's; the sampled token is replaced; the next row follows."""
    batch, state = PersistentBatch(LIMITS), DeviceBatch(Ops.reference(), LIMITS, torch.device("cpu"))
    on_device(batch, state, entering(new(), new(2, slot=1, num_tokens=20), scheduled=[12, 20]))
    on_device(batch, state, plan(slots=[0], num_scheduled=[8]))

    step = plan(
        2, cut_slots=[1], cut_blocks=[0], appended_slots=[1, 1], appended_blocks=[0, 7], copy_sources=[1],
        copy_targets=[7], chosen_slots=[0, 1], chosen_tokens=[55, 66], slots=[0, 1], num_scheduled=[1, 1],
    )  # fmt: skip
    on_device(batch, state, step)

    assert state.block_tables[1, :2].tolist() == [0, 7]
    assert state.block_tables[0, :2].tolist() == [0, 1]
    assert state.tokens[:2, 20].tolist() == [55, 66]
    assert batch.num_blocks[:2].tolist() == [2, 2]
    assert batch.num_tokens[:2].tolist() == [22, 22]


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "cut of an empty slot": ({"cut_slots": [1], "cut_blocks": [0]}, "cut_slots names slot 1"),
    "cut twice": ({"cut_slots": [0, 0], "cut_blocks": [0, 1]}, "slot 0 twice"),
    "cut that adds": ({"cut_slots": [0], "cut_blocks": [3]}, "cut_blocks keeps 3 of slot 0's 2 blocks"),
    "cut below nothing": ({"cut_slots": [0], "cut_blocks": [-1]}, "cut_blocks keeps -1"),
    "cut without blocks": ({"cut_slots": [0], "cut_blocks": []}, "cut_slots has 1 entries"),
    "token of an empty slot": ({"chosen_slots": [2], "chosen_tokens": [5]}, "chosen_slots names slot 2"),
    "token outside the vocabulary": ({"chosen_slots": [0], "chosen_tokens": [100]}, "chosen_tokens holds 100"),
    "slots without tokens": ({"chosen_slots": [0], "chosen_tokens": []}, "chosen_slots has 1 entries"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_would_break_the_batch_is_refused(name: str) -> None:
    """Before anything reaches the device."""
    fields, text = BROKEN[name]
    with pytest.raises(PlanError, match=text):
        running().apply(plan(**fields))


def test_a_beam_that_does_its_last_step_again_is_told() -> None:
    """A search preempted while its last step was under way returns with the same ids, perhaps to the same slots."""
    batch, builder = PersistentBatch(LIMITS), ResultBuilder(4, 100)
    last = new(num_tokens=20, max_total_tokens=21, logprobs=0)
    for step, freed in ((1, []), (2, [0])):
        work = batch.apply(
            StepPlan(
                step=step, planned_s=0.0, num_decodes=0, freed_slots=ints(freed), new_sequences=(last,),
                new_token_ids=ints(range(20)), new_block_ids=ints([0, 1]), slots=ints([0]), num_scheduled=ints([20]),
            )
        )  # fmt: skip
        told = builder.build(work, ints([7]), step=step, scheduler_epoch=1, received_s=0.0, launched_s=0.0, done_s=0.0)
        assert (told.sequence_ids.tolist(), told.ends.tolist()) == ([1], [END_LENGTH])
