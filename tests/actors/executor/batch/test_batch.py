"""The host side of the persistent batch: what plans do to it, and which plans are refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.batch.layout import TEMPERATURE, TOP_K
from pagebus.actors.executor.batch.step_work import Extras
from pagebus.actors.executor.device.errors import PlanError
from pagebus.bus.messages import StepPlan
from tests.actors.executor.batch_plans import DECODE, LIMITS, deltas_of, entering, new, plan, poisoned_state, running
from tests.helpers.engine_driver import ints


def test_a_prompt_samples_only_when_its_last_chunk_is_computed() -> None:
    """Chunks in the middle sample nothing; the last one samples output 0, stored behind the prompt."""
    batch = PersistentBatch(LIMITS)

    first = batch.apply(entering(new(), scheduled=[12]))
    second = batch.apply(plan(slots=[0], num_scheduled=[8]))

    assert (len(first.positions), first.starts.tolist(), first.max_context_len) == (0, [0], 12)
    assert (second.starts.tolist(), second.positions.tolist(), second.indexes.tolist()) == ([12], [20], [0])
    assert second.hidden_index.tolist() == [7]
    assert second.context_lens.tolist() == [20]
    assert not second.decode_only


def test_decode_rows_follow_one_another_without_deltas() -> None:
    """A steady decode step sends rows and nothing else."""
    batch = running()

    works = [batch.apply(DECODE) for _ in range(3)]

    assert [work.positions.tolist() for work in works] == [[21], [22], [23]]
    assert [work.indexes.tolist() for work in works] == [[1], [2], [3]]
    assert all(work.decode_only and not work.deltas for work in works)


def test_decodes_that_are_not_apart_are_prompts_of_one_token() -> None:
    """Otherwise the work is the same."""
    works = []
    for apart in (True, False):
        batch = PersistentBatch(LIMITS, decodes_apart=apart)
        batch.apply(entering(new(), scheduled=[20]))
        works.append(batch.apply(DECODE))

    assert [(work.num_decodes, work.decode_only) for work in works] == [(1, True), (0, False)]
    assert [work.positions.tolist() for work in works] == [[21], [21]]


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


def test_tokens_that_nobody_reads_are_not_said() -> None:
    """The others stand where they belong, and the next sequence's behind them."""
    batch, state = PersistentBatch(LIMITS), poisoned_state()
    rows = new(1, 2, 20, num_computed_tokens=18, first_token=17), new(2, 0, 2, num_blocks=1)

    work = batch.apply(entering(*rows, scheduled=[2, 2]))
    state.apply(deltas_of(work))

    assert state.tokens[2, 15:21].tolist() == [-9, -9, 1, 2, 3, -9]
    assert state.tokens[0, :3].tolist() == [4, 5, -9]
    assert (work.starts.tolist(), work.positions.tolist()) == ([18, 0], [20, 2])


def test_appended_blocks_continue_each_table_in_order() -> None:
    """Several blocks for one slot in one plan lie one behind the other."""
    batch, state = PersistentBatch(LIMITS), poisoned_state()
    batch.apply(entering(new(1, 0, num_blocks=2), new(2, 3, 5, num_blocks=1), scheduled=[20, 5]))

    state.apply(deltas_of(batch.apply(plan(appended_slots=[3, 0, 3], appended_blocks=[7, 8, 9]))))

    assert state.block_tables[[0, 3]].tolist() == [[-9, -9, 8, -9], [-9, 7, 9, -9]]
    assert (state.tokens == -9).all()


def test_a_table_may_begin_behind_a_window() -> None:
    """Its blocks stand where their tokens do, and later ones behind them; what they leave free is not written."""
    batch, state = PersistentBatch(replace(LIMITS, window=10)), poisoned_state()
    table = {"first_block": 1, "num_computed_tokens": 26, "num_blocks": 1, "max_total_tokens": 50}

    state.apply(deltas_of(batch.apply(entering(new(1, 2, 30, **table), scheduled=[4]))))
    state.apply(deltas_of(batch.apply(plan(1, slots=[2], num_scheduled=[1], appended_slots=[2], appended_blocks=[7]))))

    assert state.block_tables[2].tolist() == [-9, 0, 7, -9]


def test_windowed_pages_go_to_tables_of_their_own() -> None:
    """Block by block, each page to its table: of new sequences from their first block on, and of appended blocks."""
    limits = replace(LIMITS, num_blocks=30, windowed_pages=2, windowed_tokens=10)
    batch, state = PersistentBatch(limits), poisoned_state(limits)
    table = {"first_windowed": 1, "num_computed_tokens": 26, "num_blocks": 2, "max_total_tokens": 60}
    entry = structs.replace(entering(new(1, 2, 30, **table), scheduled=[4]), new_windowed=ints([10, 20]))
    appended = plan(1, slots=[2], num_scheduled=[1], appended_slots=[2], appended_blocks=[7])

    state.apply(deltas_of(batch.apply(entry)))
    state.apply(deltas_of(batch.apply(structs.replace(appended, appended_windowed=ints([11, 21])))))

    assert state.all_tables[:, 2].tolist() == [[0, 1, 7, -9], [-9, 10, 11, -9], [-9, 20, 21, -9]]
    assert [each[2].tolist() for each in (state.block_tables, *state.windowed_tables)] == state.all_tables[
        :, 2
    ].tolist()
    assert state.tokens[2, :30].tolist() == list(range(1, 31))
    assert (state.tokens[[0, 1, 3]] == -9).all()


@pytest.mark.parametrize(
    ("first", "pages", "text"),
    [
        (2, [], "sees windowed pages before block 2"),
        (1, [10], "new_windowed has 1 entries, the new sequences need 2"),
        (1, [10, 30], "new_windowed holds 30"),
    ],
)
def test_windowed_pages_that_cannot_be(first: int, pages: list[int], text: str) -> None:
    """A hole in the window, the wrong number of pages, and a page outside the cache."""
    batch = PersistentBatch(replace(LIMITS, num_blocks=30, windowed_pages=2, windowed_tokens=10))
    table = {"first_windowed": first, "num_computed_tokens": 26, "num_blocks": 2, "max_total_tokens": 60}
    wrong = structs.replace(entering(new(1, 2, 30, **table), scheduled=[4]), new_windowed=ints(pages))
    with pytest.raises(PlanError, match=text):
        batch.apply(wrong)


def test_appended_blocks_have_all_their_pages() -> None:
    """A plan that names too few is refused."""
    batch = running()
    with pytest.raises(PlanError, match="appended_windowed has 1 entries for 1 blocks"):
        batch.apply(plan(appended_slots=[0], appended_blocks=[2], appended_windowed=[1]))


def test_a_freed_slot_can_be_filled_in_the_same_plan() -> None:
    """Frees come first."""
    batch = running()

    work = batch.apply(structs.replace(entering(new(2, 0, 5)), freed_slots=ints([0])))

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
    assert first.extra_random
    assert first.extras == Extras(ruled=True, penalized=True, truncated=True)
    assert second.deltas["extra_rows"].tolist() == [0, 2]
    assert not second.extras.ruled


def test_rules_of_an_earlier_sequence_are_wiped_from_its_slot() -> None:
    """A slot that had a bias gets an empty row when the next sequence has none."""
    batch = PersistentBatch(LIMITS)
    batch.apply(entering(new(1, 0, 4, logit_bias={5: 2.0}), scheduled=[4]))

    work = batch.apply(structs.replace(entering(new(2, 0, 4)), freed_slots=ints([0])))

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
        structs.replace(entering(new(2, 1, 3)), new_token_ids=ints([1, 100, 2])), "new_token_ids holds 100"),
    "negative token": (
        structs.replace(entering(new(2, 1, 3)), new_token_ids=ints([1, -1, 2])), "new_token_ids holds -1"),
    "block outside the cache": (
        structs.replace(entering(new(2, 1, 3)), new_block_ids=ints([1, 10])), "new_block_ids holds 10"),
    "slot taken": (entering(new(2, 0)), "slot 0 is taken"),
    "slot named twice": (entering(new(2, 1, 3), new(3, 1, 3)), "slot 1 is taken"),
    "dummy slot": (entering(new(2, 4)), "slot 4 is not in"),
    "prompt longer than the model": (entering(new(2, 1, 64, max_total_tokens=65)), "max_model_len 64"),
    "prompt that leaves no room": (entering(new(2, 1, 40)), "do not fit"),
    "tokens missing": (
        structs.replace(entering(new(2, 1, 3)), new_token_ids=ints([1, 2])), "new_token_ids has 2 entries"),
    "blocks left over": (
        structs.replace(entering(new(2, 1, 3)), new_block_ids=ints([1, 2, 3])), "new_block_ids has 3 entries"),
    "tokens without a sequence": (plan(new_token_ids=[1]), "new_token_ids has 1 entries"),
    "everything computed": (entering(new(2, 1, 3, num_computed_tokens=3)), "3 tokens computed of 3"),
    "computed without blocks": (entering(new(2, 1, 20, num_computed_tokens=17, num_blocks=1)), "17 computed tokens"),
    "a table that begins late without a window": (
        entering(new(2, 1, 30, first_block=1, num_computed_tokens=20)), "token 20 sees tokens before block 1"),
    "a table that begins before its tokens": (entering(new(2, 1, first_block=-1)), "2 blocks from -1 on"),
    "a table that ends too late": (entering(new(2, 1, first_block=3)), "2 blocks from 3 on, at most 4 fit"),
    "not computed, and not said": (
        entering(new(2, 1, 20, num_computed_tokens=16, first_token=17)), "the first 17 are not said"),
    "output that is not said": (
        entering(new(2, 1, 20, num_prompt_tokens=15, num_computed_tokens=18, first_token=16)), "first 16 are not said"
    ),
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
        structs.replace(entering(new(2, 1, 3), scheduled=[1]), num_decodes=1), "counted as a decode"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_breaks_a_rule_is_refused_by_name(name: str) -> None:
    """Nothing that contradicts the batch reaches the device; the error names field and number."""
    bad, text = BAD_PLANS[name]

    with pytest.raises(PlanError, match=text):
        running().apply(bad)


@pytest.mark.parametrize(("computed", "refused"), [(24, True), (25, False)])
def test_a_table_begins_no_later_than_the_window(computed: int, refused: bool) -> None:
    """Token 24 of a window of ten sees token 15, the last of the first block."""
    late = entering(new(2, 1, 30, first_block=1, num_computed_tokens=computed, num_blocks=1), scheduled=[1])
    batch = PersistentBatch(replace(LIMITS, window=10))
    with pytest.raises(PlanError, match="sees tokens before block 1") if refused else nullcontext():
        batch.apply(late)
