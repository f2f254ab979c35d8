"""Models with windows, on CUDA: what lies behind them is given to others at once, and tokens are those of transformers.

Runs on a bare GPU host too, as tests/gpu/engine/test_engine.py does.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.model.families.registry import FAMILIES
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, make_golden, reference_generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
GOLDEN = {name: (family.model_type, fields) for family in FAMILIES for name, fields in family.golden.items()}
NUM_TOKENS = 40
SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_model_len": 320, "max_num_seqs": 32, "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64, "swap_space": 0.1,
}  # fmt: skip


def prompts() -> list[list[int]]:
    """Of up to 260 tokens; some begin alike for several windows, two are the same."""
    rng = random.Random(11)

    def some(count: int) -> list[int]:
        return [rng.randrange(DEFAULTS["vocab_size"]) for _ in range(count)]

    shared, whole = some(128), [some(count) for count in (260, 97, 3, 9, 14, 15, 20, 33)]
    return [*whole, *(shared + some(count) for count in (70, 5)), whole[0]]


@pytest.mark.parametrize("name", ["mistral", "mistral-tied", "starcoder2-plain", "phi3", "mixtral-window"])
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """Float32, with CUDA graphs: in pools with room, and in such that preempt; alone, together and behind hits."""
    folder = make_golden(tmp_path, *GOLDEN[name])
    expected = reference_generate(folder, prompts(), NUM_TOKENS)
    driver = Driver(folder, **SETTINGS)
    run_all(driver, expected, room=64, tight=10)
    driver.close()


@pytest.mark.parametrize("name", ["gemma3", "gemma2-odd", "gpt-oss", "cohere2-odd", "llama4-odd"])
def test_windows_in_some_layers(name: str, tmp_path: Path) -> None:
    """The same of models whose other layers keep everything: tables and mappings of each page, in CUDA graphs too."""
    folder = make_golden(tmp_path, *GOLDEN[name])
    expected = reference_generate(folder, prompts(), NUM_TOKENS)
    driver = Driver(folder, grouped=True, **SETTINGS | {"num_gpu_blocks_override": 256})
    pages = driver.info.windowed_pages
    assert pages
    run_all(driver, expected, room=64 * (1 + pages), tight=20 + 6 * pages)
    driver.close()


def run_all(driver: Driver, expected: list[list[int]], room: int, tight: int) -> None:
    """In pools of so many blocks, of which the ``tight`` one preempts."""
    for num_blocks, mode in ((room, "auto"), (tight, "swap"), (tight, "recompute")):
        core = CoreDriver(driver, depth=4, limits={"num_blocks": num_blocks}, preemption_mode=mode)
        for turn in range(2):
            for place, prompt in enumerate(prompts()):
                core.send(f"{turn}-{place}", prompt, NUM_TOKENS)
            core.run()
            got = [core.answers[f"{turn}-{place}"].tokens for place in range(len(expected))]
            assert got == expected, f"{num_blocks} blocks, {mode}"
        core.core.check_integrity()
        assert core.replica.counts.num_given_back > len(expected)
        assert core.replica.counts.prefix_hits > 0
        assert (core.core.num_preemptions > 0) == (num_blocks == tight)
