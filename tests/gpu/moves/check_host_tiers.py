"""A deployment whose executors share their host tiers: `python -m tests.gpu.moves.check_host_tiers [SHAPE] [OPTIONS]`.

Prompts that fit on no device are asked for in several rounds, in another order each time. Their blocks come out of host
memory, of the executor that computes or of its neighbour. With ``--deterministic`` every answer must be that of the
first round, to the token. Prints a line for each round, and what was pulled. OPTIONS are those of ``pagebus serve``.

With short prompts between long ones (``--short 100 --every-s 0.15``) the long ones meet on one executor. If answers
are long (``--answer-tokens``) and its blocks few, sequences are preempted to the other one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from pagebus.actors.bench.driver.deployment import as_served, deployed, scratch
from pagebus.actors.settings.sources import add_arguments, load_settings

COUNTED = ("pagebus:pulled_blocks_total", "pagebus:pulled_host_blocks_total", "pagebus:failed_pull_blocks_total")
COUNTED += ("pagebus:moved_preemptions_total", "vllm:num_preemptions_total")


def ask(url: str, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens of the answer."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        found: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return found


def counts(url: str) -> str:
    """What has been pulled."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return "\n".join(line for line in lines if line.startswith(COUNTED))


async def rounds(url: str, asked: argparse.Namespace) -> list[list[list[int]]]:
    """All answers of each round."""
    rng, gate = random.Random(0), asyncio.Semaphore(asked.clients)
    sizes = asked.tokens, asked.short or asked.tokens
    prompts = [[rng.randrange(100, 2000) for _ in range(sizes[number % 2])] for number in range(asked.prompts)]
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(asked.clients))

    async def one(place: int, number: int) -> tuple[int, list[int]]:
        await asyncio.sleep(place * asked.every_s)
        async with gate:
            return number, await asyncio.to_thread(ask, url, prompts[number], asked.answer_tokens)

    found = []
    for each in range(asked.rounds):
        order = range(len(prompts)) if asked.short else rng.sample(range(len(prompts)), len(prompts))
        began_s = time.monotonic()
        answers = dict(await asyncio.gather(*(one(place, number) for place, number in enumerate(order))))
        found.append([answers[number] for number in range(len(prompts))])
        print(f"round {each + 1}: {len(prompts)} prompts in {time.monotonic() - began_s:.2f} s", flush=True)
    return found


async def check(asked: argparse.Namespace) -> int:
    """Serve and ask; the exit code."""
    with scratch() as folder:
        settings = as_served(load_settings(asked), folder).replace(served_model_name="bench")
        async with deployed(settings, folder / "serve.log") as deployment:
            found = await rounds(deployment.base_url, asked)
            print(await asyncio.to_thread(counts, deployment.base_url))
    same = sum(old == new for before, after in pairwise(found) for old, new in zip(before, after, strict=True))
    total = (len(found) - 1) * asked.prompts
    distinct = len({tuple(answer) for answer in found[0]})
    print(f"{same} of {total} answers are as in the round before; {distinct} of {asked.prompts} are distinct")
    return same != total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="llama8b")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--short", type=int, default=0, help="tokens of every second prompt; then their order stays")
    parser.add_argument("--every-s", type=float, default=0.0, help="between prompts")
    parser.add_argument("--answer-tokens", type=int, default=8)
    add_arguments(parser, model=False)
    return asyncio.run(check(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
