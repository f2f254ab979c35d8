"""Prints what it costs to read a prompt of token ids: `python -m tests.web.requests.bench_ids`. The list is there."""

from __future__ import annotations

import random
import timeit
from collections.abc import Callable

import numpy as np

from pagebus.bus.messages.field_types import int_array
from pagebus.web.requests.sampling import token_array

NUM_TOKENS, VOCAB_SIZE = 15_016, 128_256
NUMBER, REPEATS = 20, 15


def main() -> None:
    """Measure."""
    rng = random.Random(0)
    ids = [rng.randrange(1000, VOCAB_SIZE) for _ in range(NUM_TOKENS)]
    ways: dict[str, Callable[[], object]] = {
        "an array by numpy": lambda: np.array(ids, np.int32),
        "an array": lambda: int_array(ids),
        "checked, and an array": lambda: token_array(ids, "prompt", VOCAB_SIZE),
    }
    for name, way in ways.items():
        least_s = min(timeit.repeat(way, number=NUMBER, repeat=REPEATS)) / NUMBER
        print(f"{NUM_TOKENS} ids, {name}: {least_s * 1e6:.1f} us")


if __name__ == "__main__":
    main()
