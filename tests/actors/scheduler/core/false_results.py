"""Results that contradict the plans, each made of a true one by a single change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import ProtocolError, ReplicaResult
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.bus.messages import END_LENGTH, END_NONE, StepResult

ROWS = ("sequence_ids", "token_ids", "token_indexes", "ends")
UNKNOWN = 2**30


def refuse_false(core: Core, name: str, result: StepResult) -> None:
    """The core refuses every false version of a replica's next result."""
    for false in _false(core.replicas[name], result):
        with pytest.raises(ProtocolError):
            core.handle(ReplicaResult(name, false))
    core.check_integrity()


def _false(replica: Replica, result: StepResult) -> Iterator[StepResult]:
    ids, ends = result.sequence_ids, result.ends
    yield replace(result, step=result.step + 1)
    yield replace(result, token_ids=np.append(result.token_ids, np.int32(0)))
    yield replace(result, **{name: np.append(getattr(result, name), np.int32(UNKNOWN)) for name in _rows(result)})
    if len(result.num_drafts) > 1:
        yield replace(result, num_drafts=result.num_drafts[1:])
    running = set(replica.slots.ids.tolist())
    for sequence_id in dict.fromkeys(ids.tolist()):
        if sequence_id not in running and not replica.step_results.expects(sequence_id):
            continue  # over: nobody wants its tokens
        mine = ids == sequence_id
        yield replace(result, **{name: getattr(result, name)[~mine] for name in _rows(result)})
        yield replace(result, token_indexes=result.token_indexes + mine)
        at_limit = mine & (ends == END_LENGTH)
        if sequence_id in running and at_limit.any():
            yield replace(result, ends=np.where(at_limit, np.int32(END_NONE), ends))


def _rows(result: StepResult) -> tuple[str, ...]:
    """The columns with a value for each row."""
    return (*ROWS, "num_drafts") if len(result.num_drafts) else ROWS
