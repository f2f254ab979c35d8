"""Settings, shapes and prompts of the tests of whole engines."""

from __future__ import annotations

import random
from typing import Any

MAX_TOKENS = 16


SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 32, "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 700,
}  # fmt: skip


BFLOAT16_SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


def make_prompts(vocab_size: int, count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 31, 33, 64, 100, 200]
    return [[rng.randrange(vocab_size) for _ in range(rng.choice(lengths))] for _ in range(count)]
