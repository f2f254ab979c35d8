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
from tests.engine_driver import Driver
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


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_every_schema_is_followed(tmp_path: Path, enforce_eager: bool) -> None:
    """Random weights, hundreds of schemas beside sequences without any: every output is one that its grammar takes."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, tmp_path)
    config = ModelConfig.load(tmp_path)
    vocabulary = load_vocabulary(tmp_path, config)
    driver = Driver(tmp_path, enforce_eager=enforce_eager, **SETTINGS)
    scheduler = driver.scheduler()
    wanted = {}
    for seed, schema in enumerate(schemas().values()):
        grammar = write_grammar(StructuredOutput(kind="json", text=json.dumps(schema), field="test"))
        params = {"temperature": 1.0, "seed": seed, "end_token_ids": config.eos_token_ids}
        wanted[scheduler.add([5, 6, 7], 900, grammar=grammar, **params).sequence_id] = grammar
        scheduler.add([5, 6, 7], 40, **params)

    driver.drive(scheduler, depth=4)

    driver.close()
    assert {scheduler.all[each].end for each in wanted} == {END_STOP}
    for each, grammar in wanted.items():
        matcher, output = make_matcher(vocabulary, grammar), scheduler.all[each].output[:-1]
        assert matcher.try_consume_tokens(output) == len(output)
        assert matcher.is_accepting()
