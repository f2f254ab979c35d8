"""Where the time goes between a prompt's arrival and its first step, and from there to the token, without a GPU.

    python -m tests.system.bench_hops [--prompts 8192 15064 64x2048] [--repeats 10] [--no-enable-prefix-caching]

Starts a deployment of the oracle, a model that costs next to nothing, on a CPU: every actor a process, over a Redis of
its own. Prompts of random tokens are submitted as token ids, those of one line at once. Prints the median and the
lowest time of each hop, by the stamps of messages, in milliseconds:

    taken      from the call that publishes the first request until a tokenizer begins with it
    tokenized  until its tokens are checked and hashed
    planned    until the scheduler begins with the plan of the first step
    received   until the executor has read that plan
    launched   until its device thread begins with it: all so far are the time to the first step
    steps      from there to the end of the last step (of no meaning: the oracle's)
    replied    from then until the text of all is in the mailbox of whoever asked
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from pagebus.actors.bench.driver.deployment import Deployment, as_served, deployed, scratch
from pagebus.actors.settings import Settings
from pagebus.bus.messages import (
    GenerateRequest,
    ReplyBatch,
    RequestsDone,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenizedRequest,
)
from tests.helpers.oracle import make_oracle

INGRESS = "bench"
HOPS = ("taken", "tokenized", "planned", "received", "launched", "steps", "replied")
BUDGET, LONGEST = 8192, 131_072
PAUSE_S = 0.05
"""Between two runs, so that the first is over for everybody."""


async def run(deployment: Deployment, requests: list[GenerateRequest]) -> list[float]:
    """When each hop was over, seconds after the first request was about to be published."""
    bus, names = deployment.bus, deployment.names
    mailbox = names.replies(INGRESS)
    streams = (names.tokenized, names.steps(deployment.executor), names.results(deployment.executor), mailbox)
    positions = {stream: await bus.last_id(stream) for stream in streams}
    tokenized: list[TokenizedRequest] = []
    plans: dict[int, StepPlan] = {}
    results: list[StepResult] = []
    replied: set[str] = set()
    began_s = time.time()
    await bus.publish((names.requests, request) for request in requests)
    while len(replied) < len(requests):
        for entry in await bus.read(positions, count=2000, block_ms=5000):
            positions[entry.stream] = entry.id
            match entry.message:
                case TokenizedRequest() as message:
                    tokenized.append(message)
                case StepPlan() as message:
                    plans[message.step] = message
                case StepResult() as message if message.num_computed_tokens:
                    results.append(message)
                case ReplyBatch() as message:
                    replied.update(message.request_ids)
                case _:
                    pass
    replied_s = time.time()
    await bus.delete(mailbox)
    done = RequestsDone(request_ids=tuple(replied), attempts=("",) * len(replied))
    await bus.publish([(names.control, done)])
    await asyncio.sleep(PAUSE_S)
    first, planned_s = results[0], plans[results[0].step].planned_s
    stamps = (tokenized[0].taken_s, tokenized[0].tokenized_s, planned_s, first.received_s, first.launched_s)
    return [stamp - began_s for stamp in (*stamps, results[-1].done_s, replied_s)]


def show(name: str, runs: list[list[float]]) -> str:
    """Median and lowest of each hop alone, and of all to the first step."""
    hops = [[after - before for before, after in zip((0.0, *run), run, strict=False)] for run in runs]
    columns = [*zip(HOPS, zip(*hops, strict=True), strict=True), ("to the first step", [run[4] for run in runs])]
    texts = [f"{hop} {median(values) * 1e3:.2f} ({min(values) * 1e3:.2f})" for hop, values in columns if hop != "steps"]
    return f"{name}: {', '.join(texts)}"


async def measure(arguments: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as parent, scratch() as folder:
        settings = Settings(
            model=str(make_oracle(Path(parent), max_model_len=LONGEST)), load_format="dummy", device="cpu", threads=1,
            max_num_batched_tokens=BUDGET, enable_prefix_caching=arguments.enable_prefix_caching,
        )  # fmt: skip
        async with deployed(as_served(settings, folder), folder / "serve.log") as deployment:
            for prompts in arguments.prompts:
                count, _, size = prompts.rpartition("x")
                runs = []
                for repeat in range(arguments.repeats + 1):
                    requests = [
                        GenerateRequest(
                            request_id=f"{prompts}-{repeat}-{number}",
                            ingress=INGRESS,
                            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
                            prompt_token_ids=rng.integers(3, deployment.vocab_size, int(size), dtype=np.int32),
                        )
                        for number in range(int(count or 1))
                    ]
                    runs.append(await run(deployment, requests))
                print(show(prompts, runs[1:]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", default=["16", "8192", "15064", "130944", "64x2048"], metavar="[NxM]")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
