"""The CPU's attention over blocks in place, against the reference that defines it."""

from __future__ import annotations

import pytest
import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.layers.cpu_attention import PLAIN, CpuPass, Scratch
from pagebus.kernels.attention.reference import Scores

BLOCK_SIZE, HEAD_DIM = 16, 64
OPS = Ops.reference()


def decode_batch(lens: list[int], tables: torch.Tensor) -> AttentionBatch:
    """One query per row; row i uses slot i."""
    count = len(lens)
    return AttentionBatch(
        slots=torch.arange(count, dtype=torch.int32),
        query_start=torch.arange(count + 1, dtype=torch.int32),
        context_lens=torch.tensor(lens, dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),  # all is in the cache
        block_tables=tables.to(torch.int32),
        num_decodes=count,
    )


def check(
    batch: AttentionBatch,
    *,
    heads: int,
    kv_heads: int,
    window: int = 0,
    num_blocks: int = 64,
    nan_after: bool = False,
    scores: Scores = PLAIN,
) -> CpuPass:
    """The CPU's answer is the reference's; returns the pass."""
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(num_blocks, 2, 2, BLOCK_SIZE, kv_heads, HEAD_DIM, generator=generator)
    if nan_after:
        for row, length in enumerate(batch.context_lens.tolist()):
            block = int(batch.block_tables[row, (length - 1) // BLOCK_SIZE])
            cache[block, :, :, (length - 1) % BLOCK_SIZE + 1 :] = float("nan")
    q = torch.randn(int(batch.query_start[-1]), heads, HEAD_DIM, generator=generator)
    k_cache, v_cache = cache.select(1, 1).unbind(1)
    cpu = CpuPass(OPS, Scratch(), batch)

    expected = OPS.paged_attention(
        q, k_cache, v_cache, slots=batch.slots, query_start=batch.query_start, context_lens=batch.context_lens,
        block_tables=batch.block_tables, scale=0.125, num_decodes=batch.num_decodes, sliding_window=window,
        softcap=scores.softcap, sinks=scores.sinks,
    )  # fmt: skip
    got = cpu.attend_queries(q, k_cache, v_cache, 0.125, window, scores)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    return cpu


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1), (5, 5)])
@pytest.mark.parametrize("window", [0, 1, 16, 37])
def test_blocks_in_place(heads: int, kv_heads: int, window: int) -> None:
    """Rows of all lengths, blocks in any order close together: read where they lie."""
    tables = torch.randperm(40, generator=torch.Generator().manual_seed(2)).view(5, 8) + 3
    cpu = check(decode_batch([1, 16, 17, 100, 128], tables), heads=heads, kv_heads=kv_heads, window=window)

    if not window:
        assert cpu._pairs[0, 0].blocks is None


@pytest.mark.parametrize("window", [0, 20])
def test_shared_blocks(window: int) -> None:
    """Rows with a common prefix share its blocks, which are then gathered."""
    tables = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 10], [5, 11, 12, 13]])
    cpu = check(decode_batch([64, 50, 33], tables), heads=4, kv_heads=2, window=window)

    assert window or cpu._pairs[0, 0].blocks is not None


def test_scattered_blocks() -> None:
    """Few blocks far apart are gathered."""
    tables = torch.tensor([[0, 900], [450, 1]])
    cpu = check(decode_batch([20, 32], tables), heads=4, kv_heads=2, num_blocks=1000)

    assert cpu._pairs[0, 0].blocks is not None


def test_nan_past_the_end() -> None:
    """What an earlier owner left in a row's last block does not reach the row."""
    tables = torch.arange(12).view(3, 4)

    check(decode_batch([5, 33, 60], tables), heads=4, kv_heads=2, nan_after=True)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_sinks(softcap: float, window: int) -> None:
    """Of each head, once for each row: far below and far above the row's scores, also where a row has no context."""
    sinks = torch.tensor([-200.0, -1.0, 0.0, 2.5, 7.0, 200.0])
    batch = decode_batch([1, 16, 0, 100, 128], torch.randperm(40).view(5, 8) + 3)
    batch.query_start = torch.tensor([0, 1, 2, 3, 4, 24], dtype=torch.int32)
    batch.num_decodes = 4

    check(batch, heads=6, kv_heads=2, window=window, scores=Scores(softcap, sinks))


def test_rows_without_context_give_zeros() -> None:
    """Padding rows have context length 0 and an answer of 0."""
    tables = torch.arange(12).view(3, 4)

    check(decode_batch([0, 33, 0], tables), heads=4, kv_heads=2)
    check(decode_batch([0, 0, 0], tables), heads=4, kv_heads=2)


def test_decodes_before_prefills() -> None:
    """Decode rows go first; rows with several queries follow in the same pass."""
    batch = decode_batch([40, 7, 50, 30], torch.arange(16).view(4, 4))
    batch.query_start = torch.tensor([0, 1, 2, 22, 52], dtype=torch.int32)
    batch.num_decodes = 2

    check(batch, heads=6, kv_heads=3)
    check(batch, heads=6, kv_heads=3, window=11)
