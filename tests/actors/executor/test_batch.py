"""The host side of the persistent batch: what plans do to it, which plans are refused, and what is sent."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from actors.bench.shapes import write_model_folder
from actors.executor.batch import TEMPERATURE, TOP_K, BatchLimits, PersistentBatch, StepWork
from actors.executor.buckets import Bucket, Buckets, decode_sizes, token_sizes
from actors.executor.device_batch import DeviceBatch
from actors.executor.errors import PlanError
from actors.executor.graphs import Graphs, empty_step
from actors.executor.loading import graph_tokens
from actors.executor.ops import Ops
from actors.executor.results import ResultBuilder
from actors.executor.runner import Runner
from actors.executor.upload import Uploader
from actors.executor.warmup import full_prompt_steps, small_steps
from actors.model_config import ModelConfig
from actors.settings import Settings
from bus.messages import END_LENGTH, END_NONE, END_STOP, NewSequence, StepPlan, StepResult
from tests.engine_driver import ints

LIMITS = BatchLimits(
    max_num_seqs=4, max_model_len=64, max_num_batched_tokens=32, block_size=16, num_blocks=10, vocab_size=100
)


def new(sequence_id: int = 1, slot: int = 0, num_tokens: int = 20, **fields: Any) -> NewSequence:
    given: dict[str, Any] = {
        "num_prompt_tokens": num_tokens, "num_computed_tokens": 0, "num_blocks": 2, "max_total_tokens": 40,
        "min_tokens": 0, "seed": 0, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    } | fields  # fmt: skip
    return NewSequence(sequence_id=sequence_id, slot=slot, num_tokens=num_tokens, **given)


def plan(num_decodes: int = 0, **fields: Any) -> StepPlan:
    arrays = {name: ints(value) if isinstance(value, list) else value for name, value in fields.items()}
    return StepPlan(step=1, planned_s=0.0, num_decodes=num_decodes, **arrays)


def entering(*sequences: NewSequence, scheduled: list[int] | None = None) -> StepPlan:
    """A plan in which ``sequences`` enter with tokens 1, 2, ... and blocks 0, 1, ... and compute ``scheduled``."""
    tokens = sum(sequence.num_tokens for sequence in sequences)
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


def poisoned_state() -> DeviceBatch:
    """A device side that holds -9 wherever nothing has been written."""
    state = DeviceBatch(Ops.reference(), LIMITS, torch.device("cpu"))
    state._words.fill_(-9)
    return state


def test_a_prompt_samples_only_when_its_last_chunk_is_computed() -> None:
    """Chunks in the middle sample nothing; the last one samples output 0, stored behind the prompt."""
    batch = PersistentBatch(LIMITS)

    first = batch.apply(entering(new(), scheduled=[12]))
    second = batch.apply(plan(slots=[0], num_scheduled=[8]))

    assert (len(first.positions), first.starts.tolist(), first.max_context_len) == (0, [0], 12)
    assert (second.starts.tolist(), second.positions.tolist(), second.indexes.tolist()) == ([12], [20], [0])
    assert second.hidden_index.tolist() == [7]
    assert not second.decode_only


def test_decode_rows_follow_one_another_without_deltas() -> None:
    """A steady decode step sends rows and nothing else."""
    batch = running()

    works = [batch.apply(DECODE) for _ in range(3)]

    assert [work.positions.tolist() for work in works] == [[21], [22], [23]]
    assert [work.indexes.tolist() for work in works] == [[1], [2], [3]]
    assert all(work.decode_only and not work.deltas for work in works)


def test_single_tokens_of_prompts_are_set_apart_from_decodes() -> None:
    """Where it is asked for, the last token of a prompt is no decode, and rows keep their order otherwise."""
    sequences = [new(1, 0), new(2, 1), new(3, 2, num_tokens=1)]
    step = plan(3, slots=[2, 1, 0], num_scheduled=[1, 1, 1])
    works = []
    for apart in (False, True):
        batch = PersistentBatch(LIMITS, single_prompts_apart=apart)
        for sequence, count in zip(sequences, (20, 19, 1), strict=True):
            batch.apply(entering(sequence, scheduled=[count]))
        works.append(batch.apply(step))

    assert [work.num_decodes for work in works] == [3, 2]
    assert [work.slots.tolist() for work in works] == [[2, 1, 0], [2, 0, 1]]
    assert works[1].sequence_ids.tolist() == [3, 1, 2]
    assert works[1].starts.tolist() == [1, 20, 19]
    assert works[1].indexes.tolist() == [1, 1, 0]


def test_new_tokens_and_blocks_go_to_their_rows() -> None:
    """And seeds and sampling columns; nothing else changes on the device."""
    batch, state = PersistentBatch(LIMITS), poisoned_state()
    rows = (
        new(1, 2, 3, num_blocks=1, max_total_tokens=9, seed=-5, top_k=7),
        new(2, 0, 2, num_blocks=2, temperature=0.5, seed=2**63 - 1),
    )

    state.apply(deltas_of(batch.apply(entering(*rows, scheduled=[3, 2]))))

    assert state.tokens[[2, 0], :4].tolist() == [[1, 2, 3, -9], [4, 5, -9, -9]]
    assert state.block_tables[[2, 0]].tolist() == [[0, -9, -9, -9], [1, 2, -9, -9]]
    assert state.seeds[[2, 0]].tolist() == [-5, 2**63 - 1]
    assert state.columns[TOP_K, [2, 0]].tolist() == [7, 0]
    assert state.columns[TEMPERATURE].view(torch.float32)[[2, 0]].tolist() == [0.0, 0.5]
    for table in (state.tokens, state.block_tables, state.columns.T):
        assert (table[[1, 3, 4]] == -9).all()


def test_appended_blocks_continue_each_table_in_order() -> None:
    """Several blocks for one slot in one plan lie one behind the other."""
    batch, state = PersistentBatch(LIMITS), poisoned_state()
    batch.apply(entering(new(1, 0, num_blocks=2), new(2, 3, 5, num_blocks=1), scheduled=[20, 5]))

    state.apply(deltas_of(batch.apply(plan(appended_slots=[3, 0, 3], appended_blocks=[7, 8, 9]))))

    assert state.block_tables[[0, 3]].tolist() == [[-9, -9, 8, -9], [-9, 7, 9, -9]]
    assert (state.tokens == -9).all()


def test_a_freed_slot_can_be_filled_in_the_same_plan() -> None:
    """Frees come first."""
    batch = running()

    work = batch.apply(dataclasses.replace(entering(new(2, 0, 5)), freed_slots=ints([0])))

    assert work.sequence_ids.tolist() == [2]
    assert batch.num_occupied == 1


def test_a_resumed_sequence_counts_its_output_from_the_prompt() -> None:
    """After a preemption the token array holds output too, and the next index goes on."""
    batch = PersistentBatch(LIMITS)

    work = batch.apply(entering(new(1, 0, 20, num_prompt_tokens=15)))

    assert work.indexes.tolist() == [5]


def test_extras_name_only_the_rows_that_need_them() -> None:
    """Truncation of a greedy row, ids outside the vocabulary and bans that are over need nothing more."""
    batch = PersistentBatch(LIMITS)
    rows = (
        new(1, 0, 4, top_k=5, logit_bias={100: 1.0}, num_blocks=1),
        new(2, 1, 4, temperature=1.0, top_k=5, num_blocks=1),
        new(3, 2, 4, min_tokens=1, end_token_ids=(3,), num_blocks=1),
        new(4, 3, 4, frequency_penalty=0.5, num_blocks=1),
    )

    first = batch.apply(entering(*rows))
    second = batch.apply(plan(4, slots=[3, 2, 1, 0], num_scheduled=[1, 1, 1, 1]))

    assert first.deltas["extra_rows"].tolist() == [1, 2, 3]
    assert (first.extra_random, first.extra_truncated, first.extra_penalized, first.extra_ruled) == (True,) * 4
    assert second.deltas["extra_rows"].tolist() == [0, 2]
    assert not second.extra_ruled


def test_rules_of_an_earlier_sequence_are_wiped_from_its_slot() -> None:
    """A slot that had a bias gets an empty row when the next sequence has none."""
    batch = PersistentBatch(LIMITS)
    batch.apply(entering(new(1, 0, 4, logit_bias={5: 2.0}), scheduled=[4]))

    work = batch.apply(dataclasses.replace(entering(new(2, 0, 4)), freed_slots=ints([0])))

    assert work.deltas["rule_slots"].tolist() == [0]
    assert set(work.deltas["rule_ids"].tolist()) == {-1}


def test_reset_empties_every_slot() -> None:
    """A new scheduler finds nothing."""
    batch = running()

    batch.reset()

    assert batch.num_occupied == 0
    assert batch.apply(entering(new(7, 0))).sequence_ids.tolist() == [7]


BAD_PLANS: dict[str, tuple[StepPlan, str]] = {
    "token outside the vocabulary": (
        dataclasses.replace(entering(new(2, 1, 3)), new_token_ids=ints([1, 100, 2])), "new_token_ids holds 100"),
    "negative token": (
        dataclasses.replace(entering(new(2, 1, 3)), new_token_ids=ints([1, -1, 2])), "new_token_ids holds -1"),
    "block outside the cache": (
        dataclasses.replace(entering(new(2, 1, 3)), new_block_ids=ints([1, 10])), "new_block_ids holds 10"),
    "slot taken": (entering(new(2, 0)), "slot 0 is taken"),
    "slot named twice": (entering(new(2, 1, 3), new(3, 1, 3)), "slot 1 is taken"),
    "dummy slot": (entering(new(2, 4)), "slot 4 is not in"),
    "prompt longer than the model": (entering(new(2, 1, 64, max_total_tokens=65)), "max_model_len 64"),
    "prompt that leaves no room": (entering(new(2, 1, 40)), "do not fit"),
    "tokens missing": (
        dataclasses.replace(entering(new(2, 1, 3)), new_token_ids=ints([1, 2])), "new_token_ids has 2 entries"),
    "blocks left over": (
        dataclasses.replace(entering(new(2, 1, 3)), new_block_ids=ints([1, 2, 3])), "new_block_ids has 3 entries"),
    "tokens without a sequence": (plan(new_token_ids=[1]), "new_token_ids has 1 entries"),
    "everything computed": (entering(new(2, 1, 3, num_computed_tokens=3)), "3 tokens computed of 3"),
    "computed without blocks": (entering(new(2, 1, 20, num_computed_tokens=17, num_blocks=1)), "17 computed tokens"),
    "more prompt than tokens": (entering(new(2, 1, 3, num_prompt_tokens=4)), "4 prompt tokens of 3"),
    "sequence id 0": (entering(new(0, 1, 3)), "ids are from 1"),
    "free of an empty slot": (plan(freed_slots=[1]), "freed_slots names slot 1"),
    "free twice": (plan(freed_slots=[0, 0]), "freed_slots names slot 0 twice"),
    "free of the dummy slot": (plan(freed_slots=[4]), "freed_slots holds 4"),
    "block for an empty slot": (plan(appended_slots=[1], appended_blocks=[1]), "appended_slots names slot 1"),
    "appended block outside the cache": (plan(appended_slots=[0], appended_blocks=[-1]), "appended_blocks holds -1"),
    "appended arrays of two lengths": (plan(appended_slots=[0], appended_blocks=[1, 2]), "appended_slots has 1"),
    "table too long": (plan(appended_slots=[0] * 3, appended_blocks=[2, 3, 4]), "slot 0 gets block 5"),
    "copy outside the cache": (plan(copy_sources=[0], copy_targets=[10]), "copy_targets holds 10"),
    "copies of two lengths": (plan(copy_sources=[0], copy_targets=[]), "copy_sources has 1"),
    "row of an empty slot": (plan(slots=[1], num_scheduled=[1]), "slots names slot 1"),
    "row twice": (plan(2, slots=[0, 0], num_scheduled=[1, 1]), "slots names slot 0 twice"),
    "row of the dummy slot": (plan(1, slots=[4], num_scheduled=[1]), "slots holds 4"),
    "rows of two lengths": (plan(1, slots=[0], num_scheduled=[1, 1]), "slots has 1"),
    "no token scheduled": (plan(slots=[0], num_scheduled=[0]), "num_scheduled is 0 for slot 0"),
    "beyond the last token": (plan(slots=[0], num_scheduled=[2]), "beyond its last token"),
    "over the budget": (entering(new(2, 1, 33, num_blocks=3)), "the budget is 32"),
    "overflowing lengths": (plan(slots=[0], num_scheduled=[2**31 - 1]), "the budget is 32"),
    "beyond the last block": (entering(new(2, 1, 20, num_blocks=1)), "beyond its last block"),
    "more decodes than rows": (plan(2, slots=[0], num_scheduled=[1]), "num_decodes is 2"),
    "decodes without rows": (plan(1), "num_decodes is 1"),
    "chunk counted as a decode": (
        dataclasses.replace(entering(new(2, 1, 3), scheduled=[1]), num_decodes=1), "counted as a decode"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_breaks_a_rule_is_refused_by_name(name: str) -> None:
    """Nothing that contradicts the batch reaches the device; the error names field and number."""
    bad, text = BAD_PLANS[name]

    with pytest.raises(PlanError, match=text):
        running().apply(bad)


# -- upload -----------------------------------------------------------------------------------------------------------


def test_upload_holds_rows_and_deltas() -> None:
    """Header rows and every delta arrive as they were, in views of one buffer."""
    batch = PersistentBatch(LIMITS)
    uploader = Uploader(torch.device("cpu"), LIMITS.max_num_seqs, 4096, 1)
    work = batch.apply(entering(new(1, 2, 20), new(2, 0, 3), scheduled=[20, 3]))

    deltas = uploader.send(work, None)

    header = uploader.header
    assert header.slots[:2].tolist() == [2, 0]
    assert header.query_start[:3].tolist() == [0, 20, 23]
    assert header.positions[:2].tolist() == [20, 3]
    assert {name: values.tolist() for name, values in deltas.items()} == {
        name: values.tolist() for name, values in work.deltas.items()
    }


def test_a_tail_too_large_for_the_ring_is_sent_apart() -> None:
    """No plan is too large; the header stays where it is."""
    uploader = Uploader(torch.device("cpu"), LIMITS.max_num_seqs, 8, 1)
    work = PersistentBatch(LIMITS).apply(entering(new(1, 0, 20)))

    deltas = uploader.send(work, None)

    assert deltas["values"].tolist()[-20:] == list(range(1, 21))
    assert uploader.header.slots[0] == 0


def test_padding_rows_name_the_dummy_slot_and_no_token() -> None:
    """Rows up to the bucket are empty: context 0, nothing stored."""
    uploader = Uploader(torch.device("cpu"), LIMITS.max_num_seqs, 64, 1)
    batch = running()

    uploader.send(batch.apply(DECODE), Bucket(4, 4))

    header = uploader.header
    assert header.slots[:4].tolist() == [0, 4, 4, 4]
    assert header.query_start[:5].tolist() == [0, 1, 1, 1, 1]
    assert header.starts[:4].tolist() == [20, 0, 0, 0]
    assert header.positions[:4].tolist() == [21, -1, -1, -1]


def test_padding_of_a_mixed_step_samples_nothing_and_lists_the_blocks_of_queries() -> None:
    """Decodes have their lengths, other rows are listed by blocks, the last first; what is left over is nothing."""
    batch = running()
    uploader = Uploader(torch.device("cpu"), LIMITS.max_num_seqs, 4096, 1, max_spans=5, block_queries=8)
    step = dataclasses.replace(
        entering(new(2, 2, 25), new(3, 1, 9, num_blocks=1)), num_decodes=1, slots=ints([0, 2, 1]),
        num_scheduled=ints([1, 17, 9]),
    )  # fmt: skip

    uploader.send(batch.apply(step), Bucket(4, 32, 5))

    header = uploader.header
    assert header.decode_lens[:4].tolist() == [21, 0, 0, 0]
    assert header.spans.tolist() == [[1, 16], [1, 8], [1, 0], [2, 8], [2, 0]]
    assert header.query_start[:5].tolist() == [0, 1, 18, 27, 27]
    assert header.sample_slots[:4].tolist() == [0, 1, 4, 4]
    assert header.hidden_index[:4].tolist() == [0, 26, 0, 0]
    assert header.positions[:4].tolist() == [21, 9, -1, -1]

    uploader.send(batch.apply(plan(1, slots=[0], num_scheduled=[1])), Bucket(4, 32, 5))

    assert header.spans[:, 0].tolist() == [-1] * 5


def test_decode_buckets_grow_by_eight_and_end_at_the_largest() -> None:
    """1, 2, 4, 8, 16, 24 ...; the largest batch has its own. Above 256 sixteen of them double the size."""
    assert decode_sizes(256) == [1, 2, 4, *range(8, 257, 8)]
    assert decode_sizes(600)[-4:] == [512, 544, 576, 600]
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]


def test_token_buckets_waste_an_eighth_at_most() -> None:
    """From 256 tokens on; below, less than 32 tokens."""
    sizes = token_sizes(2048)

    assert sizes[:8] == list(range(32, 257, 32))
    assert sizes[-1] == 2048
    assert all(after - before <= max(32, before // 8) for before, after in itertools.pairwise(sizes))
    assert token_sizes(20) == [20]


def test_large_models_have_graphs_of_fewer_tokens(tmp_path: Path) -> None:
    """Larger steps compute for as long as they take to launch; decodes of all slots always have one."""

    def tokens(name: str, **settings: Any) -> int:
        config = ModelConfig.load(write_model_folder(name, tmp_path))
        return graph_tokens(Settings(model=name, **settings), config, torch.device("cuda"))

    assert tokens("qwen06b") == 2048
    assert 256 < tokens("llama8b") < 512
    assert tokens("llama8b", max_num_seqs=600) == 600
    assert tokens("llama8b", max_cudagraph_capture_size=1000) == 1000
    assert tokens("llama8b", enforce_eager=True) == 0


def rows_of(*lengths: int, num_decodes: int = 0) -> StepWork:
    """A step whose rows compute so many tokens each."""
    return dataclasses.replace(
        empty_step(), num_decodes=num_decodes, num_tokens=sum(lengths), max_query_len=max(lengths),
        slots=np.arange(len(lengths), dtype=np.int32), query_start=np.cumsum([0, *lengths], dtype=np.int32),
    )  # fmt: skip


def test_a_bucket_is_the_smallest_that_holds_the_step() -> None:
    """Steps above the largest have none, decodes have their own."""
    buckets = Buckets(20, 512, 64)

    assert [buckets.fitting(rows_of(*[1] * rows, num_decodes=rows)) for rows in (1, 3, 9, 17, 20)] == [
        Bucket(1, 1), Bucket(4, 4), Bucket(16, 16), Bucket(20, 20), Bucket(20, 20)
    ]  # fmt: skip
    assert buckets.fitting(rows_of(1)) == Bucket(16, 32, 33)
    assert buckets.fitting(rows_of(*[1] * 16, 17, num_decodes=16)) == Bucket(20, 64, 33)
    assert buckets.fitting(rows_of(1, 500)) == Bucket(16, 512, 40)
    assert buckets.fitting(rows_of(13, 500)) is None
    assert buckets.fitting(empty_step()) is None
    assert buckets.first() == [
        *(Bucket(20, 2**n, 32 + max(1, 2**n // 64)) for n in (9, 8, 7, 6, 5)),
        *(Bucket(size, size) for size in (20, 16, 8, 4, 2, 1)),
    ]
    assert [each for each in buckets.later() if each.rows == 20][:2] == [Bucket(20, 96, 34), Bucket(20, 160, 35)]
    assert Bucket(16, 512, 40) in buckets.later()


def test_a_step_takes_the_next_larger_graph_while_its_own_is_missing() -> None:
    """With prompts or without; what is missing is asked for once."""
    buckets = Buckets(256, 512, 64)
    graphs = Graphs(buckets)
    decodes, mixed = rows_of(*[1] * 70, num_decodes=70), rows_of(1, 100, num_decodes=1)

    def chosen(work: StepWork, *captured: Bucket) -> Bucket | None:
        graphs._captured = dict.fromkeys(captured)  # type: ignore[assignment]
        return graphs.bucket(work)

    assert chosen(decodes, Bucket(64, 64), Bucket(256, 256), Bucket(128, 128)) == Bucket(128, 128)
    assert chosen(decodes, Bucket(72, 72), Bucket(128, 128)) == Bucket(72, 72)
    assert chosen(mixed, *buckets.first()) == Bucket(256, 256, 36)
    assert chosen(mixed, *buckets.first(), Bucket(64, 128, 34)) == Bucket(64, 128, 34)
    assert chosen(rows_of(600), *buckets.first()) is None
    assert [graphs._missed.get(), graphs._missed.get()] == [Bucket(72, 72), Bucket(16, 128, 34)]
    assert graphs._missed.empty()


class CountingGraphs(Graphs):
    """Notes what it is to capture."""

    def _capture(self, runner: Runner, bucket: Bucket) -> None:
        assert bucket not in self._captured
        self._captured[bucket] = cast("Any", None)


def test_missing_graphs_are_captured_until_told_otherwise() -> None:
    """None twice; one that a step misses goes before those that wait."""
    buckets = Buckets(256, 512, 64)
    missed = [Bucket(16, 128, 34), Bucket(64, 128, 34)]
    graphs = CountingGraphs(buckets)
    wanted = {*buckets.later(), *missed}
    graphs._missed.put(missed[0])

    def captured(began_s: float) -> None:
        if len(graphs._captured) == 3:
            graphs._missed.put(missed[1])
        if len(graphs._captured) == len(wanted):
            graphs.close()

    runner = SimpleNamespace(kv_cache=torch.empty(0, device="meta"))
    graphs.capture_missing(cast("Any", runner), captured)

    order = list(graphs._captured)
    assert [order[0], order[3]] == missed
    assert set(order) == wanted


def test_steps_that_do_not_suit_a_bucket_have_none() -> None:
    """More short prompts than there are blocks of queries for; long chunks behind long contexts."""
    buckets = Buckets(64, 2048, 64)
    long = rows_of(1500)

    assert buckets.fitting(rows_of(*[3] * 33)) == Bucket(64, 128, 34)
    assert buckets.fitting(rows_of(*[3] * 40)) is None
    assert buckets.fitting(long) == Bucket(16, 1536, 56)
    assert buckets.fitting(dataclasses.replace(long, max_context_len=8192)) is None


@pytest.mark.parametrize(("max_num_seqs", "largest"), [(1, 1), (1, 2048), (3, 2), (100, 64), (256, 2048), (8192, 8192)])
def test_every_bucket_has_a_token_for_each_row(max_num_seqs: int, largest: int) -> None:
    """Whatever the limits, also those that are captured unasked."""
    buckets = Buckets(max_num_seqs, largest, 64)

    every = [*buckets.first(), *buckets.later()]

    assert len(set(every)) == len(every)
    assert all(0 < bucket.rows <= min(bucket.tokens, max_num_seqs) for bucket in every)
    assert all(bucket.tokens <= largest for bucket in every)


# -- results ----------------------------------------------------------------------------------------------------------


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
    replaced = dataclasses.replace(entering(new(3, 0, 4, num_blocks=1)), freed_slots=ints([0]))
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


# -- warm-up ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [1, 3, 256])
@pytest.mark.parametrize("max_model_len", [1, 2, 3, 4, 20, 5000])
@pytest.mark.parametrize("budget", [1, 2, 16, 8192])
def test_warm_up_plans_fit_any_limits(max_num_seqs: int, max_model_len: int, budget: int) -> None:
    """The steps that measure memory and compile kernels obey the rules of every plan, on a cache of one block."""
    limits = BatchLimits(max_num_seqs, max_model_len, budget, 16, num_blocks=1, vocab_size=50)
    batch = PersistentBatch(limits)

    for plan in full_prompt_steps(limits):
        batch.reset()
        assert batch.apply(plan).num_tokens <= budget
    for group in small_steps(limits, thorough=True):
        batch.reset()
        for plan in group:
            batch.apply(plan)
