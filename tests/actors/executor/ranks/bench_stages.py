"""Tokens per second of one rank, of two stages, and of two stages without lanes: ``python -m
tests.actors.executor.ranks.bench_stages``.

All engines have one thread and random weights. The scheduler is the real one, called directly: no bus, no text. Stages
are threads of one process here, so that they share its interpreter.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_model
from tests.helpers.ranks.stage_driver import StageDriver

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 512, "max_num_seqs": 32,
    "max_num_batched_tokens": 256, "num_gpu_blocks_override": 1200, "swap_space": 0, "spec_method": "none",
}  # fmt: skip
SHAPE = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8,
}  # fmt: skip
RUNS = 3
WORK = {"decodes": (32, 4, 48), "prompts": (12, 384, 1)}
"""Sequences, tokens of each prompt, and tokens of each answer."""


def rate(driver: Driver, work: tuple[int, int, int], stages: int) -> float:
    """Tokens per second, prompts included."""
    count, length, answer = work
    core = CoreDriver(driver, limits={"stages": stages}, enable_prefix_caching=False)
    began = time.perf_counter()
    for number in range(count):
        core.send(f"r{number}", [(number + 7 * place) % 90 for place in range(length)], answer)
    core.run()
    return count * (length + answer) / (time.perf_counter() - began)


def main() -> None:
    """Print the median and the range of some runs that take turns."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), "llama3", seed=1, **SHAPE)
        one, two = Driver(model, **SETTINGS), StageDriver(model, 2, **SETTINGS)
        ways = {"one rank": (one, 1), "two stages": (two, 2), "two stages without lanes": (two, 1)}
        for name, work in WORK.items():
            found: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(RUNS):
                for way, (driver, stages) in ways.items():
                    found[way].append(rate(driver, work, stages))
            for way, rates in found.items():
                spread = f"({min(rates):.0f} to {max(rates):.0f})"
                print(f"{name:8} {way:26} {median(rates):7.0f} tokens/s {spread}", flush=True)
        one.close()
        two.close()


if __name__ == "__main__":
    main()
