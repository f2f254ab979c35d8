"""How smooth streams stay while a long prompt is read, with and without ``--itl-target-ms``, served over Redis.

    python -m tests.gpu.bench.bench_smooth llama8b [--targets 0 20 10] [--prompts 3] [--json FILE] [--record FOLDER]

Starts ``pagebus serve --load-format dummy`` anew for every target (0: none), lets 16 sequences decode, and submits
prompts of 16384 tokens, each when the one before has its first token. While the first ones are read, graphs are
captured for sizes of steps that had none. The gap between two tokens of a stream is taken from the executor's times
(``done_s``) and, as a client could see it, from when the results are read off the bus; the longest of all streams
counts, from the submission of a long prompt to its first token. With ``--record`` every step is written down as well
(``pagebus record``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagebus.actors.bench.driver.deployment import Deployment
from pagebus.actors.bench.driver.shapes import SHAPES
from pagebus.bus.contract import Bus
from pagebus.bus.messages import AbortRequest, GenerateRequest, SamplingParams, StepResult
from tests.gpu.served import recorded, served

STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS = 16, 512, 12_000
WARM_TOKENS = 150
LONG_TOKENS = 16_384
LIMITS = ["--max-model-len", "17000", "--swap-space", "0"]


def generate(name: str, num_prompt: int, max_tokens: int, vocab_size: int, seed: int) -> GenerateRequest:
    """A greedy request with a random prompt."""
    prompt = np.random.default_rng(seed).integers(0, vocab_size, num_prompt, dtype=np.int32)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, ingress="bench", sampling=sampling, prompt_token_ids=prompt)


@dataclass(slots=True)
class Watch:
    """Reads results; keeps the gaps between tokens of known sequences, in milliseconds."""

    bus: Bus
    stream: str
    position: Any
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    gaps: list[tuple[float, float]] = field(default_factory=list)

    async def read(self) -> None:
        for entry in await self.bus.read({self.stream: self.position}, count=100, block_ms=1000):
            self.position = entry.id
            if isinstance(entry.message, StepResult):
                self._take(entry.message, time.time())

    def _take(self, result: StepResult, read_s: float) -> None:
        for sequence_id in result.sequence_ids.tolist():
            if sequence_id in self.times:
                done_s, seen_s = self.times[sequence_id]
                self.gaps.append(((result.done_s - done_s) * 1e3, (read_s - seen_s) * 1e3))
            self.times[sequence_id] = result.done_s, read_s
            self.counts[sequence_id] = self.counts.get(sequence_id, 0) + 1


async def measure(deployment: Deployment, num_prompts: int) -> dict[str, Any]:
    """The gaps before the long prompts, and during each."""
    bus, on_bus, vocab_size = deployment.bus, deployment.names, deployment.vocab_size
    stream = on_bus.results(deployment.executor)
    watch = Watch(bus, stream, await bus.last_id(stream))
    names = [f"stream-{index}" for index in range(STREAMS)]
    sent = [generate(name, STREAM_PROMPT_TOKENS, STREAM_TOKENS, vocab_size, i) for i, name in enumerate(names)]
    await bus.publish((on_bus.requests, request) for request in sent)
    while len(watch.counts) < STREAMS or min(watch.counts.values()) < WARM_TOKENS:
        await watch.read()
    watch.gaps.clear()
    while len(watch.gaps) < 50 * STREAMS:
        await watch.read()
    rows = [_row("alone", watch, 0.0)]
    for index in range(num_prompts):
        known = set(watch.counts)
        watch.gaps.clear()
        began = time.time()
        await bus.publish([(on_bus.requests, generate(f"long-{index}", LONG_TOKENS, 1, vocab_size, 1000 + index))])
        while watch.counts.keys() == known:
            await watch.read()
        (new,) = watch.counts.keys() - known
        rows.append(_row(f"prompt {index + 1}", watch, watch.times[new][0] - began))
    await bus.publish((on_bus.control, AbortRequest(request_id=name)) for name in names)
    return {"rows": rows}


def _row(name: str, watch: Watch, ttft_s: float) -> dict[str, Any]:
    done, seen = (np.array(gaps) for gaps in zip(*watch.gaps, strict=True))
    return {
        "when": name,
        "tokens": len(done),
        "gap_ms_p50": float(np.median(done)),
        "gap_ms_p99": float(np.quantile(done, 0.99)),
        "gap_ms_max": float(done.max()),
        "read_gap_ms_max": float(seen.max()),
        "long_ttft_s": ttft_s,
    }


async def bench(name: str, target_ms: float, num_prompts: int, record: Path | None, extra: list[str]) -> dict[str, Any]:
    target = ["--itl-target-ms", str(target_ms)] if target_ms else []
    out = record and record / f"{name}-{target_ms:g}.jsonl"
    async with served(name, [*LIMITS, *target, *extra]) as deployment, recorded(deployment, out):
        figures = await measure(deployment, num_prompts)
    return {"model": name, "itl_target_ms": target_ms or None, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--targets", type=float, nargs="+", default=[0, 20, 10], metavar="MS")
    parser.add_argument("--prompts", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    args, extra = parser.parse_known_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results = []
    for target_ms in args.targets:
        result = asyncio.run(bench(args.model, target_ms, args.prompts, args.record, extra))
        results.append(result)
        for row in result["rows"]:
            worst = row["gap_ms_max"]
            verdict = f"{worst / target_ms:.2f} x target" if target_ms else ""
            print(
                f"{args.model} target {target_ms or None} ms, {row['when']:9s} gap p50 {row['gap_ms_p50']:6.2f}"
                f"  p99 {row['gap_ms_p99']:7.2f}  max {worst:7.2f} ms (read {row['read_gap_ms_max']:.2f})"
                f"  first token after {row['long_ttft_s']:.2f} s  {verdict}",
                flush=True,
            )
        if args.json:
            args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
