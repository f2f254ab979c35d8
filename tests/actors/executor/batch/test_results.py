"""Sampled tokens become the result of a step."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.batch.results import ResultBuilder
from pagebus.bus.messages import END_LENGTH, END_NONE, END_STOP, StepPlan, StepResult
from tests.actors.executor.batch_plans import LIMITS, entering, new, plan
from tests.helpers.engine_driver import ints


def result(builder: ResultBuilder, batch: PersistentBatch, step: StepPlan, *tokens: int, epoch: int = 1) -> StepResult:
    return builder.build(
        batch.apply(step), ints(tokens), step=1, scheduler_epoch=epoch, received_s=0.0, launched_s=0.0, done_s=0.0
    )


def test_an_end_token_ends_and_later_rows_are_dropped() -> None:
    """The rows that pipelining planned after the end do not come through; a new sequence in the slot does."""
    batch, builder = PersistentBatch(LIMITS), ResultBuilder(4, 100)
    step = entering(new(1, 0, 4, end_token_ids=(9, 8), num_blocks=1), new(2, 1, 4, num_blocks=1))
    both = plan(2, slots=[0, 1], num_scheduled=[1, 1])

    first = result(builder, batch, step, 7, 9)
    second = result(builder, batch, both, 8, 7)
    third = result(builder, batch, both, 5, 6)
    replaced = structs.replace(entering(new(3, 0, 4, num_blocks=1)), freed_slots=ints([0]))
    fourth = result(builder, batch, replaced, 5)

    assert first.ends.tolist() == [END_NONE, END_NONE]
    assert second.ends.tolist() == [END_STOP, END_NONE]
    assert (third.sequence_ids.tolist(), third.token_ids.tolist(), third.token_indexes.tolist()) == ([2], [6], [2])
    assert fourth.sequence_ids.tolist() == [3]


def test_the_last_token_ends_by_length_and_an_end_token_wins() -> None:
    """END_LENGTH at max_total_tokens, END_STOP if that last token is an end token."""
    batch, builder = PersistentBatch(LIMITS), ResultBuilder(4, 100)
    rows = [new(i + 1, i, 4, max_total_tokens=5, end_token_ids=(9,), num_blocks=1) for i in range(2)]

    ended = result(builder, batch, entering(*rows), 1, 9)

    assert ended.ends.tolist() == [END_LENGTH, END_STOP]


def test_ends_of_one_scheduler_do_not_touch_the_next_ones_sequences() -> None:
    """Ids are a scheduler's own."""
    batch, builder = PersistentBatch(LIMITS), ResultBuilder(4, 100)
    step = entering(new(1, 0, 4, end_token_ids=(9,), num_blocks=1))
    result(builder, batch, step, 9)
    batch.reset()

    assert result(builder, batch, step, 3, epoch=2).token_ids.tolist() == [3]


def test_arrays_of_results_are_int32() -> None:
    """What the codec sends."""
    batch, builder = PersistentBatch(LIMITS), ResultBuilder(4, 100)

    built = result(builder, batch, entering(new()), 3)

    kinds = {getattr(built, name).dtype for name in ("sequence_ids", "token_ids", "token_indexes", "ends")}
    assert kinds == {np.dtype(np.int32)}
