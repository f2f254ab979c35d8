"""Prints what it costs to check and hash a prompt of token ids, in CPU time.

Run: ``python -m tests.actors.tokenizer.bench_encode``. Each prompt is new, and then comes again with another
end.
"""

from __future__ import annotations

import argparse
import time
from statistics import quantiles

import numpy as np

from pagebus.actors.tokenizer.encode import Encoder, Limits
from pagebus.bus.messages import GenerateRequest, Int32Array, SamplingParams, TokenizedRequest

VOCAB_SIZE = 128_000
OTHERS = 16


def took_us(encoder: Encoder, ids: Int32Array) -> float:
    """Microseconds for one prompt."""
    asked = GenerateRequest(
        request_id="bench", ingress="bench", sampling=SamplingParams(max_tokens=1), prompt_token_ids=ids
    )
    began_s = time.thread_time()
    (outcome,) = encoder.encode([asked])
    ended_s = time.thread_time()
    assert isinstance(outcome.reply, TokenizedRequest)
    return (ended_s - began_s) * 1e6


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=15_016)
    parser.add_argument("--repeats", type=int, default=60)
    asked = parser.parse_args()
    encoder, rng = Encoder(None, Limits(2 * asked.tokens, VOCAB_SIZE, 16)), np.random.default_rng(0)
    new, again = [], []
    for _ in range(asked.repeats):
        ids = rng.integers(0, VOCAB_SIZE, asked.tokens, np.int32)
        new.append(took_us(encoder, ids))
        again.append(took_us(encoder, np.concatenate((ids[:-OTHERS], ids[:OTHERS]))))
    for what, times in (("new", new), ("all but the end known", again)):
        low, middle, _ = quantiles(times, n=4)
        print(f"{asked.tokens} tokens, {what}: median {middle:.0f} us, lower quartile {low:.0f} us")


if __name__ == "__main__":
    main()
