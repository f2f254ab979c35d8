"""Logprobs of one given token per row and of the most likely tokens, without sorting a row."""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import next_power_of_2, tl, triton

BLOCK = 2048  # values whose largest is kept; a chosen one's successor is found among them


def token_logprobs_reference(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Log softmax of logits [R, V] float32 at tokens [R] (in the vocabulary) and at each row's num_top largest.

    Returns [R, 2 + 2 * num_top] int32, float32 values as their bits, so that one copy brings all to the host: the
    token's log probability, its rank (1 for the most likely), the ids of the most likely tokens, their log
    probabilities. Of equal logits the lower id comes first; NaN counts as -inf.
    """
    total = torch.logsumexp(without_nan(logits), dim=1, keepdim=True)
    keys = keys_reference(logits)
    own = keys.gather(1, tokens.long().unsqueeze(1))
    top = keys.topk(num_top, dim=1).values
    return packed_reference(own, (keys > own).sum(1, keepdim=True) + 1, top, total)


def pick_logits(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logits [K] of the tokens ``ids`` [K] int64 in ``rows`` [K] int64 of logits [R, V]."""
    return logits[rows, ids]


def without_nan(logits: torch.Tensor) -> torch.Tensor:
    """Logits of which NaN is -inf, and -0 is 0, which it is equal to."""
    return torch.where(logits == logits, logits, -torch.inf) + 0.0


def keys_reference(logits: torch.Tensor, first_id: int = 0) -> torch.Tensor:
    """int64 keys of logits [R, W] float32 of the tokens from ``first_id`` on, that compare like (logit, lower id)."""
    bits = without_nan(logits).view(torch.int32)
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)  # at most 31 bits
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | (0x7FFFFFFF - ids)


def packed_reference(own: torch.Tensor, rank: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """What `token_logprobs_reference` returns, from the keys of each row's token [R, 1], its ranks [R, 1], the keys of
    the most likely tokens [R, k], from the largest on, and the logs of the rows' sums of exponentials [R, 1]."""
    logprobs = (_logits_of(torch.cat([own, top], dim=1)) - total).view(torch.int32)
    ids = 0x7FFFFFFF - (top & 0x7FFFFFFF)
    return torch.cat([logprobs[:, :1], rank.int(), ids.int(), logprobs[:, 1:]], dim=1)


def _logits_of(keys: torch.Tensor) -> torch.Tensor:
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


@triton.jit
def _keys(logits, place, size):
    """int64 keys that compare like (logit, lower id); past the end less than any."""
    x = tl.load(logits + place, mask=place < size, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf")) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return tl.where(place < size, (ordered << 32) | (0x7FFFFFFF - place).to(tl.int64), -0x7FFFFFFFFFFFFFFF)


@triton.jit
def _id_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _logit_of(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens_ptr", "num_top", "stride_out"])
def _logprobs_kernel(
    logits_ptr,  # [R, V]
    tokens_ptr,  # [R]
    out_ptr,  # [R, 2 + 2 * num_top] int32
    num_top,
    stride_logits,
    stride_out,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride_logits
    out = out_ptr + row * stride_out
    lane = tl.arange(0, BLOCK)
    chunk = tl.arange(0, CHUNKS)

    # The largest of each chunk.
    best = tl.full([CHUNKS], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, VOCAB, BLOCK):
        largest = tl.max(_keys(logits, start + lane, VOCAB), axis=0)
        best = tl.where(chunk == start // BLOCK, largest, best)
    highest = _logit_of(tl.max(best, axis=0))

    token = tl.load(tokens_ptr + row).to(tl.int32)
    key = tl.max(_keys(logits, token + tl.zeros([1], tl.int32), VOCAB), axis=0)
    mass = tl.zeros([BLOCK], tl.float32)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        keys = _keys(logits, start + lane, VOCAB)
        mass += tl.where(start + lane < VOCAB, tl.exp(_logit_of(keys) - highest), 0.0)
        before += (keys > key).to(tl.int32)
    total = highest + tl.log(tl.sum(mass, axis=0))
    tl.store(out, (_logit_of(key) - total).to(tl.int32, bitcast=True))
    tl.store(out + 1, tl.sum(before, axis=0) + 1)

    # The largest of all, then what comes next in its chunk takes its place.
    for place in range(num_top):
        key = tl.max(best, axis=0)
        top = _id_of(key)
        tl.store(out + 2 + place, top)
        tl.store(out + 2 + num_top + place, (_logit_of(key) - total).to(tl.int32, bitcast=True))
        keys = _keys(logits, top // BLOCK * BLOCK + lane, VOCAB)
        following = tl.max(tl.where(keys < key, keys, -0x7FFFFFFFFFFFFFFF), axis=0)
        best = tl.where(chunk == top // BLOCK, following, best)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Log probabilities of each row's token and of its most likely ones; see `token_logprobs_reference`."""
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert tokens.shape == (num_rows,)
    assert tokens.is_contiguous()
    assert 0 <= num_top <= vocab
    result = torch.empty((num_rows, 2 + 2 * num_top), dtype=torch.int32, device=logits.device)
    if num_rows:
        chunks = next_power_of_2(-(-vocab // BLOCK))
        _logprobs_kernel[(num_rows,)](
            logits, tokens, result, num_top, logits.stride(0), result.stride(0),
            VOCAB=vocab, CHUNKS=chunks, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return result
