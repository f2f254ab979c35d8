"""Plans for a small persistent batch, and the batch they are for."""

from __future__ import annotations

from typing import Any

import torch

from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.ops import Ops
from pagebus.bus.messages import NewSequence, StepPlan
from tests.helpers.engine_driver import ints
from tests.helpers.sampling_fields import gathered

LIMITS = BatchLimits(
    max_num_seqs=4, max_model_len=64, max_num_batched_tokens=32, block_size=16, num_blocks=10, vocab_size=100
)


def new(sequence_id: int = 1, slot: int = 0, num_tokens: int = 20, **fields: Any) -> NewSequence:
    given: dict[str, Any] = {
        "num_prompt_tokens": num_tokens, "num_computed_tokens": 0, "num_blocks": 2, "max_total_tokens": 40,
        "seed": 0, "temperature": 0.0,
    } | fields  # fmt: skip
    return NewSequence(sequence_id=sequence_id, slot=slot, num_tokens=num_tokens, **gathered(NewSequence, given))


def plan(num_decodes: int = 0, **fields: Any) -> StepPlan:
    arrays = {name: ints(value) if isinstance(value, list) else value for name, value in fields.items()}
    return StepPlan(step=1, planned_s=0.0, num_decodes=num_decodes, **arrays)


def entering(*sequences: NewSequence, scheduled: list[int] | None = None) -> StepPlan:
    """A plan in which ``sequences`` enter with tokens 1, 2, ... and blocks 0, 1, ... and compute ``scheduled``."""
    tokens = sum(sequence.num_tokens - sequence.first_token for sequence in sequences)
    blocks = sum(sequence.num_blocks for sequence in sequences)
    return plan(
        new_sequences=sequences,
        new_token_ids=[1 + i % 99 for i in range(tokens)],
        new_block_ids=list(range(blocks)),
        slots=[sequence.slot for sequence in sequences],
        num_scheduled=scheduled or [sequence.num_tokens for sequence in sequences],
    )


DECODE = plan(1, slots=[0], num_scheduled=[1])


def running() -> PersistentBatch:
    """A batch whose slot 0 holds sequence 1: 21 tokens, 20 of them computed, 2 blocks."""
    batch = PersistentBatch(LIMITS)
    batch.apply(entering(new()))
    return batch


def deltas_of(work: StepWork) -> dict[str, torch.Tensor]:
    """As if they had been uploaded."""
    return {name: torch.from_numpy(values) for name, values in work.deltas.items()}


def poisoned_state(limits: BatchLimits = LIMITS) -> DeviceBatch:
    """A device side that holds -9 wherever nothing has been written."""
    state = DeviceBatch(Ops.reference(), limits, torch.device("cpu"))
    state._words.fill_(-9)
    return state
