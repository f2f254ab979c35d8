"""Launches of sampling and of what changes logits before, on tensors of no memory, for compiling them without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagebus.kernels.sampling.bad_words import apply_bad_words
from pagebus.kernels.sampling.logit_bias import apply_logit_rules
from pagebus.kernels.sampling.logprobs import token_logprobs
from pagebus.kernels.sampling.parts import Part, Wanted, chunk_scores, part_best, rank_best
from pagebus.kernels.sampling.penalties import apply_penalties
from pagebus.kernels.sampling.sampling import sample
from pagebus.kernels.sampling.token_masks import apply_token_masks
from tests.kernels.attention.launches import meta

ROWS, VOCAB = 256, 128256
FP32 = torch.float32


def samplings() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and launches."""
    for dtype, truncation in ((torch.bfloat16, False), (FP32, False), (FP32, True)):
        yield f"sample {ROWS}x{VOCAB} {dtype.itemsize} bytes {truncation=}", partial(_sample, dtype, truncation)
    yield f"sample {ROWS}x{VOCAB} as rank 1 of 2", _sample_part
    yield "scores", _score


def _sample(dtype: torch.dtype, truncation: bool) -> None:
    ints, floats = meta(ROWS), meta(ROWS, dtype=FP32)
    sample(
        meta(ROWS, VOCAB, dtype=dtype), ints, floats, ints, floats, floats, meta(ROWS, dtype=torch.int64), ints,
        any_random=True, any_truncation=truncation,
    )  # fmt: skip


def _sample_part() -> None:
    part, ints = Part(1, 2, VOCAB), meta(ROWS)
    logits, told = meta(ROWS, len(part.own), dtype=FP32), meta(2, ROWS, part.most_chunks, dtype=FP32)
    wanted = Wanted(ints, ints, meta(ROWS, dtype=FP32), meta(ROWS, dtype=torch.int64))
    chunk_scores(logits, part, wanted, any_random=True)
    best = part_best(logits, told, part, wanted, any_random=True)
    rank_best(meta(2, *best.shape, dtype=best.dtype))  # torch.stack, without memory, imports its compiler: two seconds


def _score() -> None:
    """Log probabilities, and all that changes logits."""
    logits, rows, floats, table = meta(ROWS, VOCAB, dtype=FP32), meta(ROWS), meta(ROWS, dtype=FP32), meta(257, 512)
    token_logprobs(logits, rows, 20)
    apply_token_masks(logits, rows, meta(257, 4008))
    apply_bad_words(logits, meta(257, 8192), rows, rows, rows, table, table)
    apply_logit_rules(logits, rows, rows, table, meta(257, 512, dtype=FP32), table)
    apply_penalties(logits, meta(257, 8192), rows, rows, rows, floats, floats, floats)
