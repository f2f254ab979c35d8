"""What speculation gains with the shipped model on this machine's CPU, by kind of prompt.

    python -m tests.shipped_model.bench_speculation [--drafts 4] [--shortest 3] [--longest 5] [--batches 1 8]
        [--rounds 5] [--threads 1] [--method ngram]

Greedy, float32, scheduler and engine in one process, no bus. ``dictionary``: questions that the model was trained on.
``code``: functions to go on with. ``copy``: conversations in which a question is asked again, so that the answer stands
in the prompt. ``prediction``: questions alone, with the answer as the prediction (OpenAI's field). Each kind of prompt
is computed without speculation and with it, in turn, and the outputs are compared. ``--method eagle3``: by the shipped
head, in place of the lookup. ``accepted`` is the share of the
drafts, ``fewer steps`` says how many steps without speculation there were for one with it; the last three columns are
medians.
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


def scheduler(driver: Driver) -> CoreDriver:
    """A new one, which knows nothing yet of what drafts cost and of how many are right."""
    return CoreDriver(driver, eos_token_ids=(4,), enable_prefix_caching=False)


def run(core: CoreDriver, kind: str, prompts: Prompts) -> tuple[list[list[int]], float]:
    """The outputs, and tokens per second from the first one on."""
    names = [f"{len(core.answers) + number}" for number in range(len(prompts))]
    for name, (prompt, prediction) in zip(names, prompts, strict=True):
        most = CODE_TOKENS if kind == "code" else MOST_TOKENS
        told = {"prediction_token_ids": np.array(prediction, np.int32)}
        core.send(name, prompt, most, {"ignore_eos": kind == "code"}, **told)
    answers = [core.answers[name] for name in names]
    core.run(until=lambda: all(answer.tokens for answer in answers))
    begun, known = time.perf_counter(), sum(len(answer.tokens) for answer in answers)
    core.run()
    spent_s = time.perf_counter() - begun
    outputs = [answer.tokens for answer in answers]
    return outputs, (sum(map(len, outputs)) - known) / spent_s


def measure(plain: Driver, drafting: Driver, batch: int, kind: str, prompts: Prompts, rounds: int) -> str:
    """A line of the table."""
    off, on = scheduler(plain), scheduler(drafting)
    speeds: list[tuple[float, float]] = []
    tokens = 0
    for _ in range(rounds):
        for begin in range(0, len(prompts), batch):
            chosen = prompts[begin : begin + batch]
            (expected, slow), (found, fast) = run(off, kind, chosen), run(on, kind, chosen)
            assert found == expected, f"{kind}: speculation has changed tokens"
            speeds.append((slow, fast))
            tokens += sum(map(len, found))
    acceptance = on.replica.step_results.acceptance
    share = f"{acceptance.num_accepted / max(1, acceptance.num_draft_tokens):.0%}"
    slow, fast = (statistics.median(each) for each in zip(*speeds, strict=True))
    ratio = statistics.median(fast / slow for slow, fast in speeds)
    steps = len(off.results) / len(on.results)
    told = f"{tokens} | {acceptance.num_draft_tokens} | {share} | {steps:.2f} | {slow:.0f} | {fast:.0f} | {ratio:.2f}"
    return f"| {batch} | {kind} | {told} |"


def bench(plain: Driver, drafting: Driver, batch: int, rounds: int) -> None:
    """One line for each kind of prompt."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    asked = prompts_of(tokenizer, [[]] * len(WORDS))["dictionary"]
    answers = run(scheduler(plain), "dictionary", asked)[0]
    for kind, prompts in prompts_of(tokenizer, answers).items():
        print(measure(plain, drafting, batch, kind, prompts, rounds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--shortest", type=int, default=3)
    parser.add_argument("--longest", type=int, default=5)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", choices=("ngram", "eagle3"), default="ngram")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "threads": arguments.threads,
        "num_gpu_blocks_override": 400,
    }  # fmt: skip
    drafts: dict[str, Any] = {"spec_method": arguments.method, "spec_tokens": arguments.drafts}
    if arguments.method == "ngram":
        drafts |= {"prompt_lookup_min": arguments.shortest, "prompt_lookup_max": arguments.longest}
    plain, drafting = Driver(FOLDER, **settings, spec_method="none"), Driver(FOLDER, **settings, **drafts)
    print("| batch | prompts | tokens | drafts | accepted | fewer steps | off, tokens/s | on, tokens/s | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for batch in arguments.batches:
        bench(plain, drafting, batch, arguments.rounds)
    for driver in (plain, drafting):
        driver.close()


if __name__ == "__main__":
    main()
