"""Beam search on CUDA: the scheduler's core over the engine finds the beams of transformers.

Runs on a bare GPU host too, as test_engine.py does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.beam_reference import reference_beams
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import REFERENCE_CONFIGS, load_reference, make_reference, reference_generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 32, "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 300, "swap_space": 0.1,
}  # fmt: skip
ENDS = tuple(range(0, 300, 7))
SEARCHES: list[dict[str, Any]] = [
    {"width": 2, "max_tokens": 20, "ends": ENDS},
    {"width": 6, "max_tokens": 40, "ends": ENDS[:9], "length_penalty": 2.0},
    {"width": 4, "max_tokens": 33, "ends": ()},
    {"width": 5, "max_tokens": 20, "ends": ENDS, "length_penalty": -1.0, "early_stopping": True},
    {"width": 12, "max_tokens": 24, "ends": ENDS[:3], "min_tokens": 3},
]


@pytest.fixture(scope="module", params=["llama3", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = next(config for config in REFERENCE_CONFIGS if config.arch == request.param)
    return make_reference(tmp_path_factory.mktemp(request.param), config)


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[Driver]:
    driver = Driver(folder, **SETTINGS)
    yield driver
    driver.close()


@pytest.mark.parametrize(
    ("limits", "mode"), [({}, "auto"), ({"num_blocks": 25}, "swap"), ({"num_blocks": 25}, "recompute")]
)
def test_beams_equal_transformers(folder: Path, driver: Driver, limits: dict[str, int], mode: str) -> None:
    """Float32, with CUDA graphs: searches of many widths beside ordinary requests, with room and without."""
    model = load_reference(folder)
    rng = random.Random(1)
    prompts = [[rng.randrange(307) for _ in range(length)] for length in (1, 16, 33, 40, 7)]
    core = CoreDriver(driver, limits=limits, preemption_mode=mode)
    for place, (prompt, options) in enumerate(zip(prompts, SEARCHES, strict=True)):
        given = {name: value for name, value in options.items() if name not in ("width", "max_tokens", "ends")}
        given |= {"n": options["width"], "beam_width": options["width"], "stop_token_ids": options["ends"]}
        core.send(f"beams{place}", prompt, options["max_tokens"], given)
        core.send(f"plain{place}", prompt, 30)
    core.run()
    expected = reference_generate(folder, prompts, 30)
    for place, (prompt, options) in enumerate(zip(prompts, SEARCHES, strict=True)):
        given = {name: value for name, value in options.items() if name not in ("width", "max_tokens", "ends")}
        beams = reference_beams(model, prompt, options["width"], options["max_tokens"], options["ends"], **given)
        assert core.answers[f"beams{place}"].beams == [tokens for tokens, _ in beams], f"search {place}"
        assert core.answers[f"plain{place}"].tokens == expected[place]
    core.core.check_integrity()
    assert not core.core.requests
    assert (core.core.num_preemptions > 0) == bool(limits)
