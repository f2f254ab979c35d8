"""Output tokens per second of 256 mixed-length requests on the shipped model on a CPU: Pagebus beside transformers.

    python -m tests.system.bench_cpu [--requests 256] [--batch 64] [--threads 2]

Transformers runs static batches of ``--batch`` (left-padded, each until its longest answer is done); Pagebus runs the
same requests with ``max_num_seqs`` of the same size, through its actors over the memory bus. Both greedy, float32, in
one process, on the same threads; a warm-up of each is not counted, and tokens nobody asked for do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import pagebus.actors.shipped_model
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from tests.system.harness import System

FOLDER = Path(pagebus.actors.shipped_model.__file__).parent
VOCAB_SIZE = 4096
Request = tuple[list[int], int]


def make_requests(count: int, seed: int = 0) -> list[Request]:
    """(prompt, number of output tokens), each length uniform in 16..256."""
    rng = random.Random(seed)
    lengths = [(rng.randint(16, 256), rng.randint(16, 256)) for _ in range(count)]
    return [([rng.randrange(5, VOCAB_SIZE) for _ in range(prompt)], output) for prompt, output in lengths]


def run_transformers(model: torch.nn.Module, requests: list[Request], batch: int) -> float:
    """Seconds for all requests in static batches."""
    started = time.perf_counter()
    for first in range(0, len(requests), batch):
        rows = requests[first : first + batch]
        width = max(len(prompt) for prompt, _ in rows)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in rows])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in rows])
        longest = max(output for _, output in rows)
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, min_new_tokens=longest, max_new_tokens=longest
        )
    return time.perf_counter() - started


async def run_pagebus(system: System, requests: list[Request]) -> float:
    """Seconds for all requests, submitted at once."""
    started = time.perf_counter()
    futures = [system.submit(prompt, max_tokens=output)[1] for prompt, output in requests]
    answers = await asyncio.gather(*futures)
    assert [len(answer) for answer in answers] == [output for _, output in requests]
    return time.perf_counter() - started


async def pagebus(requests: list[Request], batch: int, threads: int) -> float:
    server = MemoryServer()
    system = System(
        FOLDER,
        lambda: MemoryBus(server),
        max_num_seqs=batch,
        enable_prefix_caching=False,
        threads=threads,
    )
    await system.start()
    await run_pagebus(system, make_requests(8, seed=1))
    seconds = await run_pagebus(system, requests)
    await system.stop()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    requests = make_requests(args.requests)
    tokens = sum(output for _, output in requests)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    with torch.inference_mode():
        run_transformers(model, make_requests(8, seed=1), args.batch)
        theirs = run_transformers(model, requests, args.batch)
    ours = asyncio.run(pagebus(requests, args.batch, args.threads))
    print(f"{args.requests} requests, {tokens} output tokens, batch {args.batch}, {args.threads} threads")
    print(f"transformers  {tokens / theirs:8.0f} output tokens/s  ({theirs:.1f} s)")
    print(f"pagebus       {tokens / ours:8.0f} output tokens/s  ({ours:.1f} s)")
    print(f"ratio         {theirs / ours:8.2f}")


if __name__ == "__main__":
    main()
