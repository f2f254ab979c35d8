"""What a step sends to the device."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.batch.buckets import Bucket
from pagebus.actors.executor.batch.upload import Uploader
from pagebus.kernels.attention.prefill_plan import QuerySpans, fixed_config
from tests.actors.executor.batch_plans import DECODE, LIMITS, entering, new, plan, running
from tests.helpers.engine_driver import ints


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


def test_rows_that_follow_a_grammar_are_told_which_mask_is_theirs() -> None:
    """Others, and rows of nothing, have none."""
    batch = PersistentBatch(LIMITS)
    uploader = Uploader(torch.device("cpu"), LIMITS.max_num_seqs, 64, 1)
    grammars = ["", "a", "b"]
    batch.apply(entering(*(new(i + 1, i, 4, grammar=each, num_blocks=1) for i, each in enumerate(grammars))))
    work = batch.apply(plan(3, slots=[2, 0, 1], num_scheduled=[1, 1, 1]))

    uploader.send(work, Bucket(4, 4))

    assert work.constrained.tolist() == [0, 2]
    assert (work.extras.constrained, work.extras.masked) == (True, False)
    assert uploader.header.mask_places[:4].tolist() == [0, -1, 1, -1]


def test_padding_of_a_mixed_step_samples_nothing_and_cuts_nothing() -> None:
    """Decodes have their lengths, other rows are cut as it was said; what is left over is nothing."""
    batch = running()
    uploader = Uploader(torch.device("cpu"), LIMITS.max_num_seqs, 4096, 1, max_spans=6, max_merges=2)
    step = structs.replace(
        entering(new(2, 2, 25), new(3, 1, 9, num_blocks=1)), num_decodes=1, slots=ints([0, 2, 1]),
        num_scheduled=ints([1, 17, 9]),
    )  # fmt: skip

    cut = QuerySpans(
        fixed_config(64, 2), ints([[1, 0, 0, 128, 0], [1, 0, 128, 130, 1], [2, 0, 0, 9, -1]]), ints([[1, 0, 2, 17]])
    )
    work = batch.apply(step)

    deltas = uploader.send(work, Bucket(4, 32, 5), cut)

    header = uploader.header
    assert header.decode_lens[:4].tolist() == [21, 0, 0, 0]
    assert header.spans[:3].tolist() == cut.spans.tolist()
    assert header.spans[3:5, 0].tolist() == [-1, -1]
    assert header.merges.tolist() == [[1, 0, 2, 17], [0, 0, 0, 0]]
    assert header.query_start[:5].tolist() == [0, 1, 18, 27, 27]
    assert header.sample_slots[:4].tolist() == [0, 1, 4, 4]
    assert header.hidden_index[:4].tolist() == [0, 26, 0, 0]
    assert header.sample_lens[:4].tolist() == [21, 9, 0, 0]
    assert header.positions[:4].tolist() == [21, 9, -1, -1]

    assert {name: values.tolist() for name, values in deltas.items()} == {
        name: values.tolist() for name, values in work.deltas.items()
    }

    uploader.send(batch.apply(plan(1, slots=[0], num_scheduled=[1])), Bucket(4, 32, 5))

    assert header.spans[:5, 0].tolist() == [-1] * 5
    assert not header.merges.any()


def test_a_step_without_a_bucket_has_its_own_spans() -> None:
    """As many as it is cut into, and its deltas behind them."""
    uploader = Uploader(torch.device("cpu"), LIMITS.max_num_seqs, 4096, 1, max_spans=6, max_merges=2)
    work = PersistentBatch(LIMITS).apply(entering(new(1, 2, 20)))
    cut = QuerySpans(fixed_config(64, 2), ints([[0, 16, 0, 20, -1], [0, 0, 0, 16, -1]]), ints([[]]).reshape(0, 4))

    deltas = uploader.send(work, None, cut)

    assert uploader.header.spans[:2].tolist() == cut.spans.tolist()
    assert deltas["values"].tolist() == work.deltas["values"].tolist()


@pytest.mark.parametrize("pools_all", [False, True])
def test_parts_that_are_pooled_begin_among_the_states_that_there_are(pools_all: bool) -> None:
    """Those of all tokens, or of tokens behind which one is sampled. Behind a step's parts there are empty ones
    alone, none of the step before."""
    batch = PersistentBatch(LIMITS, pools_all=pools_all)
    uploader = Uploader(torch.device("cpu"), LIMITS.max_num_seqs, 4096, 1)
    rows = (new(1, 0, 4), new(2, 1, 3, pooled_from=2), new(3, 2, 5, pooled_from=4))
    work = batch.apply(entering(*(structs.replace(each, num_blocks=1) for each in rows)))

    uploader.send(work, Bucket(4, 32))

    assert work.logprob_rows is not None
    assert work.logprob_rows.reads_prompts is pools_all
    assert not work.logprob_rows.reads_more(pools_all=pools_all)
    firsts, counts = uploader.header.parts
    assert firsts[:2].tolist() == ([6, 11] if pools_all else [1, 2])
    assert counts[:4].tolist() == [1, 1, 0, 0]

    uploader.send(batch.apply(plan(1, slots=[0], num_scheduled=[1])), Bucket(4, 4))

    assert counts[:4].tolist() == [0, 0, 0, 0]


def test_means_are_not_among_the_states_of_last_tokens() -> None:
    """Steps that pool them have no graph if graphs give these alone."""
    batch = PersistentBatch(LIMITS)
    work = batch.apply(entering(new(1, 0, 4, pooled_from=0, num_blocks=1)))

    assert work.logprob_rows is not None
    assert work.logprob_rows.reads_more(pools_all=False)
    assert not work.logprob_rows.reads_more(pools_all=True)
    assert (work.logprob_rows.pooled_firsts.tolist(), work.logprob_rows.pooled_lengths.tolist()) == ([0], [4])
