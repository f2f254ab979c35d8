"""Launches of the kernels of batches, of drafts and of pooled parts, for those who compile them without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pagebus.kernels.batch.draft_lookup import look_up_drafts
from pagebus.kernels.batch.drafts import accept_drafts, resolve_starts
from pagebus.kernels.batch.guesses import begin_chain, keep_features, part_guesses, store_guesses
from pagebus.kernels.batch.inputs import prepare_inputs, store_sampled
from pagebus.kernels.batch.scatter_words import scatter_words
from pagebus.kernels.layers.parts import sum_parts
from tests.kernels.attention.launches import meta


def inputs() -> Iterator[tuple[str, Callable[[], None]]]:
    """What a step begins and ends with, by name."""
    yield "inputs", launch_inputs


def launch_inputs() -> None:
    """Of 256 rows with 2048 tokens, of which 256 are sampled, and a step's changes."""
    tokens, rows, words = meta(257, 8192), meta(256), meta(1000)
    prepare_inputs(
        tokens, meta(2, 257, 512), rows, rows, meta(257), 16, input_ids=meta(2048), positions=meta(2048),
        slot_mapping=meta(2, 2048, dtype=torch.int64), context_lens=rows,
    )  # fmt: skip
    store_sampled(tokens, rows, rows, rows)
    scatter_words(meta(1 << 20), words, words)


def drafts_and_parts() -> Iterator[tuple[str, Callable[[], None]]]:
    """Each with its name."""
    yield "drafts", launch_drafts
    yield "parts", launch_parts


def launch_drafts() -> None:
    """A step of 256 rows with four drafts each."""
    rows, samples, slots = meta(256), meta(1280), meta(257)
    resolve_starts(slots, rows, rows, rows, samples, samples, samples, samples, samples)
    accept_drafts(samples, samples, samples, samples, slots, rows, slots, slots, 4, 1280)
    features = meta(256, 4096, dtype=torch.bfloat16)
    store_guesses(
        meta(256, 32000, dtype=torch.float32), meta(32000), features, meta(257, 8192), rows, rows, rows, features[:256]
    )  # fmt: skip
    part_guesses(meta(256, 16000, dtype=torch.float32), 16000)
    store_guesses(meta(2, 256, 2), meta(32000), features, meta(257, 8192), rows, rows, rows, features[:256])
    begin_chain(rows, slots, slots, features, 1, 256, meta(3, 256), features)
    keep_features(features, rows, rows, slots, slots, features)
    look_up_drafts(meta(257, 8192), slots, slots, rows, 4, 1, 5, 128256, rows, slots, 8208)


def launch_parts() -> None:
    """Those of 16 prompts that are pooled."""
    sum_parts(meta(512, 1024, dtype=torch.bfloat16), meta(16), meta(16))
