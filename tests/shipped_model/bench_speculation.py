"""What speculation gains with the shipped model on this machine's CPU, by kind of prompt.

    python -m tests.shipped_model.bench_speculation [--drafts 4] [--shortest 2] [--longest 5] [--batches 1 8]
        [--rounds 5] [--threads 1]

Greedy, float32, scheduler and engine in one process, no bus. ``dictionary``: questions that the model was trained on.
``code``: functions to go on with. ``copy``: conversations in which a question is asked again, so that the answer stands
in the prompt. ``prediction``: questions alone, with the answer as the prediction (OpenAI's field). Each kind of prompt
is computed without speculation and with it, in turn, and the outputs are compared. ``tokens/s`` are medians of the
rounds; ``accepted`` is the share of the drafts that were verified.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver

FOLDER = Path(__file__).parents[2] / "actors" / "shipped_model"
WORDS = ("gravity", "harbor", "justice", "lantern", "meadow", "orchestra", "pilgrim", "quarry")
MOST_TOKENS, CODE_TOKENS = 96, 64
CODE = (
    "def add_{0}(first, second):\n    return first + second\n\n"
    "def sub_{0}(first, second):\n    return first - second\n\n"
    "def mul_{0}(first, second):\n    return"
)  # fmt: skip
Prompts = list[tuple[list[int], list[int]]]
"""Each with what is predicted for it."""


def question(word: str) -> str:
    return f"<|user|>What does {word} mean?<|end|><|assistant|>"


def prompts_of(tokenizer: Tokenizer, answers: list[list[int]]) -> dict[str, Prompts]:
    """By kind; ``answers`` are those to the questions."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    asked = [ids("<|bos|>" + question(word)) for word in WORDS]
    again = [first + answer + ids(question(word)) for first, answer, word in zip(asked, answers, WORDS, strict=True)]
    return {
        "dictionary": [(each, []) for each in asked],
        "code": [(ids("<|bos|>" + CODE.format(word)), []) for word in WORDS],
        "copy": [(each, []) for each in again],
        "prediction": list(zip(asked, answers, strict=True)),
    }


def run(driver: Driver, kind: str, prompts: Prompts, **config: Any) -> tuple[list[list[int]], float, CoreDriver]:
    """The outputs, tokens per second from the first one on, and the scheduler."""
    core = CoreDriver(driver, eos_token_ids=(4,), enable_prefix_caching=False, **config)
    for number, (prompt, prediction) in enumerate(prompts):
        most = CODE_TOKENS if kind == "code" else MOST_TOKENS
        told = {"prediction_token_ids": np.array(prediction, np.int32)}
        core.send(str(number), prompt, most, {"ignore_eos": kind == "code"}, **told)
    core.run(until=lambda: all(answer.tokens for answer in core.answers.values()))
    begun, known = time.perf_counter(), sum(len(answer.tokens) for answer in core.answers.values())
    core.run()
    spent_s = time.perf_counter() - begun
    outputs = [answer.tokens for answer in core.answers.values()]
    return outputs, (sum(map(len, outputs)) - known) / spent_s, core


def bench(plain: Driver, drafting: Driver, batch: int, rounds: int) -> None:
    """One line for each kind of prompt."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    answers = run(plain, "dictionary", [(each, []) for each, _ in prompts_of(tokenizer, [[]] * 8)["dictionary"]])[0]
    for kind, prompts in prompts_of(tokenizer, answers).items():
        speeds: dict[str, list[float]] = {"off": [], "on": []}
        drafted = accepted = tokens = steps = 0
        for _ in range(rounds):
            for begin in range(0, len(prompts), batch):
                chosen = prompts[begin : begin + batch]
                expected, speed, _ = run(plain, kind, chosen)
                speeds["off"].append(speed)
                found, speed, core = run(drafting, kind, chosen)
                speeds["on"].append(speed)
                assert found == expected, f"{kind}: speculation has changed tokens"
                acceptance = core.replica.step_results.acceptance
                drafted, accepted = drafted + acceptance.num_draft_tokens, accepted + acceptance.num_accepted
                tokens, steps = tokens + sum(map(len, found)), steps + len(core.results) * len(chosen)
        off, on = (statistics.median(speeds[mode]) for mode in ("off", "on"))
        share = f"{accepted / drafted:.0%}" if drafted else "-"
        print(
            f"| {batch} | {kind} | {drafted} | {share} | {tokens / steps:.2f} | {off:.0f} | {on:.0f} | {on / off:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--shortest", type=int, default=2)
    parser.add_argument("--longest", type=int, default=5)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "threads": arguments.threads,
        "num_gpu_blocks_override": 400,
    }  # fmt: skip
    lookup = {
        "spec_method": "ngram", "spec_tokens": arguments.drafts, "prompt_lookup_min": arguments.shortest,
        "prompt_lookup_max": arguments.longest,
    }  # fmt: skip
    plain, drafting = Driver(FOLDER, **settings), Driver(FOLDER, **settings, **lookup)
    print("| batch | prompts | drafts | accepted | tokens a row and step | off, tokens/s | on, tokens/s | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for batch in arguments.batches:
        bench(plain, drafting, batch, arguments.rounds)
    for driver in (plain, drafting):
        driver.close()


if __name__ == "__main__":
    main()
