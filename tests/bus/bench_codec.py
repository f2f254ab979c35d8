"""Prints what the bus's codec costs per message, in CPU time. Run: ``python -m tests.bus.bench_codec``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pagebus.bus.codec import decode, encode
from pagebus.bus.messages import (  # fmt: skip
    GenerateRequest,
    Int32Array,
    Message,
    NewSequence,
    ReplyBatch,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenizedRequest,
)

CALLS, REPEATS = 2000, 7
SAMPLING = SamplingParams(max_tokens=256, temperature=0.7, top_p=0.9, stop=("\n\n", "User:"), seed=12345)


def ints(count: int) -> Int32Array:
    return np.arange(count, dtype=np.int32)


def entering(sequence_id: int) -> NewSequence:
    return NewSequence(
        sequence_id=sequence_id, slot=sequence_id, num_tokens=512, num_prompt_tokens=512, num_computed_tokens=16,
        num_blocks=32, max_total_tokens=768, seed=2**62 + sequence_id, sampling=SAMPLING,
        end_token_ids=(128001, 128008, 128009),
    )  # fmt: skip


def plan(rows: int, new: int = 0) -> StepPlan:
    return StepPlan(
        step=10, planned_s=1234.5, num_decodes=rows - new, slots=ints(rows), num_scheduled=ints(rows), executor_epoch=3,
        new_sequences=tuple(map(entering, range(new))), new_token_ids=ints(512 * new), new_block_ids=ints(32 * new),
        appended_slots=ints(rows // 16), appended_blocks=ints(rows // 16),
    )  # fmt: skip


def result(rows: int) -> StepResult:
    return StepResult(
        step=10, scheduler_epoch=1, received_s=12.5, launched_s=12.6, done_s=12.7, num_computed_tokens=rows,
        sequence_ids=ints(rows), token_ids=ints(rows), token_indexes=ints(rows), ends=ints(rows), busy_s=0.01,
    )  # fmt: skip


def messages() -> dict[str, Message]:
    name = f"chatcmpl-{7:032x}"
    chat = ({"role": "system", "content": "You are helpful."}, {"role": "user", "content": "x" * 2000})
    return {
        "plan, 1 row": plan(1),
        "plan, 256 rows": plan(256),
        "plan, 256 rows, 16 enter": plan(256, 16),
        "result, 1 row": result(1),
        "result, 256 rows": result(256),
        "request of a client": GenerateRequest(
            request_id=name, ingress="ingress-1", sampling=SAMPLING, messages=chat, arrived_s=1e9, attempt="a",
            client="key",
        ),
        "request with 512 tokens": TokenizedRequest(
            request_id=name, ingress="ingress-1", sampling=SAMPLING, arrived_s=1e9, tokenized_s=1e9,
            prompt_token_ids=ints(512), block_hashes=ints(128), attempt="a", client="key",
        ),
        "replies, 64 rows": ReplyBatch(
            request_ids=(name,) * 64, texts=(" hello",) * 64, finish_reasons=(None,) * 64, stop_reasons=(None,) * 64,
            choice_indexes=ints(64), num_output_tokens=ints(64), num_prompt_tokens=ints(64), num_cached_tokens=ints(64),
            text_offsets=ints(64),
        ),
    }  # fmt: skip


def microseconds(call: Callable[[], Any]) -> float:
    """Of the calling thread's CPU, the best of some repeats."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        best = min(best, (time.thread_time_ns() - start) / CALLS / 1e3)
    return best


def main() -> None:
    print(f"{'':26} {'make':>7} {'encode':>7} {'decode':>7} us {'header':>7} bytes")
    for name, message in messages().items():
        frame = encode(message)
        names = getattr(message, "__struct_fields__", None) or message.__slots__
        values = {each: getattr(message, each) for each in names}
        cost = [
            microseconds(lambda message=message, values=values: type(message)(**values)),
            microseconds(lambda message=message: encode(message)),
            microseconds(lambda frame=frame: decode(frame)),
        ]
        print(f"{name:26} {' '.join(f'{each:7.2f}' for each in cost)}    {len(frame[b'h']):7}")


if __name__ == "__main__":
    main()
