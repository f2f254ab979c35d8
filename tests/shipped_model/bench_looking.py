"""What it costs to look up drafts where nothing repeats itself, with the shipped model on this machine's CPU.

    python -m tests.shipped_model.bench_looking [--batches 1 8] [--rounds 20]

One engine, so that all have the same memory; scheduler and engine in one process, no bus. In turn: no step looks for
drafts (``never``), as steps of an engine without speculation; as the scheduler chooses (``watch``), which goes on from
round to round; all do (``always``). Microseconds of the process's CPU time a step: the least of all rounds, which other
programs disturb least.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from tokenizers import Tokenizer

from pagebus.actors.scheduler.replica.drafts.watch import Watch
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.shipped_model.bench_speculation import FOLDER, WORDS, Prompts, prompts_of, run, scheduler


class Fixed(Watch):
    """Every step looks, or none."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self._always = always

    def looks(self) -> bool:
        return self._always


def cpu_us(core: CoreDriver, prompts: Prompts) -> float:
    """A step's CPU time."""
    steps, began = len(core.results), time.process_time()
    run(core, "code", prompts)
    return (time.process_time() - began) / (len(core.results) - steps) * 1e6


def measure(driver: Driver, prompts: Prompts, rounds: int) -> dict[str, float]:
    """The least of each. A scheduler of its own runs each round, as an engine has one at a time."""
    least: dict[str, float] = {}
    watches = {"never": Fixed(always=False), "watch": Watch(), "always": Fixed(always=True)}
    for _ in range(rounds):
        for name, watch in watches.items():
            core = scheduler(driver)
            core.replica.depth.watch = watch
            least[name] = min(least.get(name, float("inf")), cpu_us(core, prompts))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "threads": 1,
        "num_gpu_blocks_override": 400,
    }  # fmt: skip
    driver = Driver(FOLDER, **settings)
    prompts = prompts_of(Tokenizer.from_file(str(FOLDER / "tokenizer.json")), [[]] * len(WORDS))["code"]
    print("| batch | never, us a step | watch | always |")
    print("| --- | --- | --- | --- |")
    for batch in arguments.batches:
        least = measure(driver, prompts[:batch], arguments.rounds)
        more = (f"{least[name]:.0f} ({least[name] / least['never'] - 1:+.1%})" for name in ("watch", "always"))
        print(f"| {batch} | {least['never']:.0f} | {' | '.join(more)} |", flush=True)
    driver.close()


if __name__ == "__main__":
    main()
