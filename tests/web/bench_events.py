"""What the ingress's own code takes for each token that it streams: from a batch of replies to the bytes of the events.

    python -m tests.web.bench_events [--streams 64] [--tokens 100] [--rounds 60]

In one process, without sockets or a bus; half of the rounds count: those that were disturbed least. For the cost of
the whole process see :mod:`tests.web.bench_streams`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvloop

from pagebus.actors.telemetry.logs import get_logger
from pagebus.actors.telemetry.metrics import Metrics
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import GenerateRequest, ReplyBatch, SamplingParams
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names
from pagebus.web.answers import sse, writing
from pagebus.web.answers.detailed import DetailedCompletionChunks
from pagebus.web.answers.resume import Resumption
from pagebus.web.answers.returning import ReturningChunks
from pagebus.web.calls.answer_details import AnswerDetails
from pagebus.web.calls.call import Call
from pagebus.web.ingress.inbox import Inbox
from pagebus.web.requests.parsed_request import StreamOptions
from pagebus.web.routes.generate import generation
from pagebus.web.telemetry.metrics import IngressMetrics

TEXTS = (" water", " is", " a", " clear", " liquid", ",", " and", " so", " on")
KINDS = ("completions", "chat", "usage", "resumable", "reported")


class Written:
    """In the place of an HTTP response: takes what is written."""

    prepared = True
    num_bytes = 0
    """Of all there are."""

    def __init__(self, **_: object) -> None:
        """Headers do not matter."""

    async def write(self, data: bytes) -> None:
        Written.num_bytes += len(data)

    write_eof = write


def chunks_of(kind: str, call: Call) -> sse.Chunks:
    """Who writes the events of a call of this kind."""
    options = StreamOptions(usage=kind == "usage", continuous=kind == "usage")
    about = "cmpl-0123456789abcdef0123456789abcdef", 1_700_000_000, "some-model", options
    if kind == "reported":
        call.show(details := AnswerDetails(logprobs=0))
        return DetailedCompletionChunks(*about, details)
    chunks = sse.CompletionChunks(*about) if kind == "completions" else sse.ChatChunks(*about)
    if kind != "resumable":
        return chunks
    return ReturningChunks(chunks, call.choices, Resumption("id", "attempt", None).seen_of(1, streaming=True))


def replies(ids: tuple[str, ...], step: int, said: int, last: bool, told: bool) -> ReplyBatch:
    """One more token for each."""
    count = len(ids)

    def all_of(value: int) -> np.ndarray:
        return np.full(count, value, np.int32)

    tokens = {"token_counts": all_of(1), "token_ids": all_of(7), "token_bits": all_of(0), "top_counts": all_of(0),
              "token_texts": {7: " a"}} if told else {}  # fmt: skip
    return ReplyBatch(
        request_ids=ids, texts=(TEXTS[step % len(TEXTS)],) * count, stop_reasons=(None,) * count,
        finish_reasons=("length" if last else None,) * count, choice_indexes=all_of(0), num_output_tokens=all_of(step),
        num_prompt_tokens=all_of(7), num_cached_tokens=all_of(0), text_offsets=all_of(said), **tokens,
    )  # fmt: skip


async def one_round(kind: str, count: int, tokens: int) -> float:
    """Microseconds of processor time a token."""
    inbox = make_inbox()
    calls = [submit(inbox, number, "attempt" if kind == "resumable" else "") for number in range(count)]
    context: Any = SimpleNamespace(streams=writing.Streams(), settings=SimpleNamespace(sse_keep_alive_interval=0.0))
    request: Any = None
    tasks = [asyncio.create_task(generation.stream(request, context, call, chunks_of(kind, call))) for call in calls]
    ids, said = tuple(call.requests[0].request_id for call in calls), 0
    batches = []
    for step in range(1, tokens + 1):
        batches.append(replies(ids, step, said, step == tokens, kind == "reported"))
        said += len(TEXTS[step % len(TEXTS)])
    await asyncio.sleep(0)
    began_s = time.thread_time()
    for each in batches:
        assert not inbox.deliver(each)
        await asyncio.sleep(0)
    took_s = time.thread_time() - began_s
    await asyncio.gather(*tasks)
    return took_s / count / tokens * 1e6


def submit(inbox: Inbox, number: int, attempt: str) -> Call:
    """One more call."""
    asked = GenerateRequest(
        request_id=f"cmpl-{number:032x}", ingress="i", prompt="a", attempt=attempt, arrived_s=0.0,
        sampling=SamplingParams(),
    )  # fmt: skip
    return inbox.submit([asked], streaming=True)


def make_inbox() -> Inbox:
    """One over a bus to which nobody else listens."""
    bus = MemoryBus(MemoryServer())
    return Inbox(bus, Names(), "i", Outbox(bus, 0), IngressMetrics(Metrics(), 4096), get_logger())


async def measure(arguments: argparse.Namespace) -> None:
    writing.web = SimpleNamespace(StreamResponse=Written)  # type: ignore[attr-defined]
    for kind in arguments.kinds:
        found = []
        Written.num_bytes = 0
        for _ in range(arguments.rounds):
            gc.collect()
            found.append(await one_round(kind, arguments.streams, arguments.tokens))
        found.sort()
        num_bytes = Written.num_bytes / arguments.rounds / arguments.streams / arguments.tokens
        half = found[: len(found) // 2]
        print(f"{kind:12} {found[0]:6.2f} us a token, {sum(half) / len(half):6.2f} in the better half, "
              f"{num_bytes:.0f} bytes")  # fmt: skip


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.web.bench_events")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
