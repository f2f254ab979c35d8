"""The graphs of steps with many short prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagebus.actors.executor.batch.buckets import Bucket, Buckets
from tests.actors.executor.batch.test_buckets import rows_of


def test_many_short_prompts_have_a_block_of_queries_each() -> None:
    """As when sequences move, or many chats go on at once. Few have buckets with fewer blocks."""
    buckets = Buckets(256, 2048, 64)

    assert buckets.fitting(rows_of(*[3] * 33)) == Bucket(64, 128, 34)
    assert buckets.fitting(rows_of(*[3] * 40)) == Bucket(64, 128, 66)
    assert buckets.fitting(rows_of(*[1] * 60, *[13] * 43, num_decodes=60)) == Bucket(128, 640, 138)
    assert buckets.fitting(rows_of(*[13] * 256)) is None
    assert [bucket in buckets.first() for bucket in (Bucket(256, 1024, 272), Bucket(256, 512, 264))] == [True, True]
    assert Bucket(256, 768, 268) in buckets.later()


@given(st.lists(st.integers(1, 70), min_size=1, max_size=40), st.sampled_from([16, 64]), st.data())
def test_right_after_a_start_a_graph_holds_rows_of_any_lengths(
    lengths: list[int], block: int, data: st.DataObject
) -> None:
    """Of at most twice the tokens, with a block of queries for each."""
    buckets, num_decodes = Buckets(40, 40 * 70, block), data.draw(st.integers(0, lengths.count(1)))
    lengths = sorted(lengths)
    own = buckets.fitting(rows_of(*lengths, num_decodes=num_decodes))
    assert own is not None
    spans = sum(-(-length // block) for length in lengths[num_decodes:])
    assert spans <= own.spans or num_decodes == len(lengths)
    found = [each for each in buckets.first() if each in [own, *buckets.above(own)]]
    assert min(each.tokens for each in found) <= 2 * own.tokens or num_decodes == len(lengths)
