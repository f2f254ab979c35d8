"""Sequences that are kept to a grammar on CUDA: graphs, steps planned ahead, masks that come to the device in time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import actors.shipped_model
from actors.grammar import load_vocabulary, make_matcher, write_grammar
from actors.model_config import ModelConfig
from bus.messages import END_STOP, StructuredOutput
from tests.engine_driver import Driver, HandScheduler
from tests.json_schemas import schemas

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

SHIPPED = Path(actors.shipped_model.__file__).parent
SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 1024, "max_num_seqs": 64,
    "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 4500,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, tmp_path)
    return tmp_path


def add_schemas(scheduler: HandScheduler, folder: Path, count: int | None = None) -> dict[int, str]:
    """Sequences that follow the schemas, sampled almost evenly, beside others; their grammars by id."""
    wanted, ends = {}, ModelConfig.load(folder).eos_token_ids
    for seed, schema in enumerate(list(schemas().values())[:count]):
        grammar = write_grammar(StructuredOutput(kind="json", text=json.dumps(schema), field="test"))
        params = {"temperature": 1.0, "seed": seed, "end_token_ids": ends}
        wanted[scheduler.add([5, 6, 7], 900, grammar=grammar, **params).sequence_id] = grammar
        scheduler.add([5, 6, 7], 40, **params)
    return wanted


def check(scheduler: HandScheduler, folder: Path, wanted: dict[int, str]) -> None:
    """Every output is whole, and one that its grammar takes."""
    vocabulary = load_vocabulary(folder, ModelConfig.load(folder))
    assert {scheduler.all[each].end for each in wanted} == {END_STOP}
    for each, grammar in wanted.items():
        matcher, output = make_matcher(vocabulary, grammar), scheduler.all[each].output[:-1]
        assert matcher.try_consume_tokens(output) == len(output)
        assert matcher.is_accepting()


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_every_schema_is_followed(folder: Path, enforce_eager: bool) -> None:
    """Random weights, hundreds of schemas beside sequences without any: every output is one that its grammar takes."""
    driver = Driver(folder, enforce_eager=enforce_eager, **SETTINGS)
    scheduler = driver.scheduler()
    wanted = add_schemas(scheduler, folder)

    driver.drive(scheduler, depth=4)

    driver.close()
    check(scheduler, folder, wanted)


def test_masks_that_cannot_be_filled_end_the_engine(folder: Path) -> None:
    """The error of the thread that fills them is told, and all threads end."""
    driver = Driver(folder, **SETTINGS)
    scheduler = driver.scheduler()
    add_schemas(scheduler, folder, 8)

    def fail(*_: Any) -> None:
        raise MemoryError("no masks")

    driver.engine._follow._followers.fill = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no masks"):
        driver.drive(scheduler)

    assert driver.engine.stop()
