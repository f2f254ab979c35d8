"""Steps of few tokens behind a long past, which have a graph with a launch shape of its own."""

from __future__ import annotations

import dataclasses

from pagebus.actors.executor.batch.buckets import Bucket, Buckets
from pagebus.kernels.attention.prefill_plan import FEW_PAST
from tests.actors.executor.batch.test_buckets import rows_of


def test_few_tokens_behind_a_long_past_have_a_bucket() -> None:
    """Where they have a launch shape, and one without kernels of decodes if there are none. Until it is captured, the
    one for any past holds them, or a larger one."""
    buckets, few = Buckets(256, 512, 64, packs_few=True), Bucket(16, 32, 33, long_past=True, decodes=False)
    mixed = dataclasses.replace(few, decodes=True)

    def fitting(*lengths: int, past: int, num_decodes: int = 0) -> Bucket | None:
        work = rows_of(*lengths, num_decodes=num_decodes)
        return buckets.fitting(dataclasses.replace(work, max_context_len=past + max(lengths)))

    assert fitting(24, past=FEW_PAST) == few
    assert fitting(1, 8, past=FEW_PAST, num_decodes=1) == mixed
    assert [each.most_decodes for each in (few, mixed)] == [0, 16]
    assert fitting(24, past=1000) == dataclasses.replace(mixed, long_past=False) == buckets.above(few)[0]
    assert fitting(40, past=FEW_PAST) == Bucket(16, 64, 33)
    assert fitting(1, past=FEW_PAST, num_decodes=1) == Bucket(1, 1)
    assert {few, mixed} <= set(buckets.covering_kernels())
    assert {few, mixed} <= set(buckets.later())
    assert not any(each.long_past for each in Buckets(256, 512, 64).later())
