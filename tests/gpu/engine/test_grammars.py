"""Sequences that are kept to a grammar on CUDA: graphs, steps planned ahead, masks that come to the device in time.
Sampling from graphs of its own, with grammars and with whatever else is asked for beyond plain sampling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import pagebus.actors.shipped_model
from pagebus.actors.executor.graphs.resampling import Resampling
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.grammars.grammar import load_vocabulary, make_matcher, write_grammar
from pagebus.bus.messages import END_STOP, StructuredOutput
from tests.helpers.engine_driver import Driver
from tests.helpers.json_schemas import schemas

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

SHIPPED = Path(pagebus.actors.shipped_model.__file__).parent
SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 1024, "max_num_seqs": 64,
    "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 4500,
}  # fmt: skip


OTHERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {11: 4.0, 12: -3.0}, "min_tokens": 5, "end_token_ids": (1, 2)},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(5, 300, 2))},
    {"temperature": 1.0, "bad_words_token_ids": ((7,), (9, 4), (12, 200, 31))},
]


def copy_shipped(folder: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder)


def crowd(driver: Driver, kinds: list[dict[str, Any]], *, preempted: bool) -> list[list[int]]:
    """Outputs of twice as many sequences as there are slots. Some are computed again at last, if wanted."""
    scheduler, count = driver.scheduler(600), 128
    for seed in range(count):
        kind = kinds[seed % len(kinds)]
        scheduler.add([5, 6, 7 + seed % 9] * (1 + seed % 7), 20 + seed % 40, seed=seed, **kind)

    leaving = {number for number in scheduler.all if number % 5 == 0}

    def preempt(_: object) -> None:
        for each in list(scheduler.running):
            if each.sequence_id in leaving and len(each.output) == 9:
                leaving.remove(each.sequence_id)
                scheduler.preempt(each)

    driver.drive(scheduler, depth=1 if preempted else 4, on_result=preempt if preempted else None)
    assert not (leaving and preempted)
    return [sequence.output for sequence in scheduler.all.values()]


@pytest.mark.parametrize("deterministic", [False, True])
def test_graphs_sample_what_launches_sample(
    tmp_path: Path, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: grammars alone, beside all other wishes, and these alone; with steps planned ahead, and with
    sequences that come back."""
    copy_shipped(tmp_path)
    schema = {"type": "array", "minItems": 3, "items": {"type": "string", "maxLength": 9}}
    grammar = write_grammar(StructuredOutput(kind="json", text=json.dumps(schema), field="test"))
    ends = ModelConfig.load(tmp_path).eos_token_ids
    followed = [{"grammar": grammar, "end_token_ids": ends, "temperature": each} for each in (0.0, 1.0)]
    driver = Driver(tmp_path, deterministic=deterministic, **SETTINGS)
    graphs = driver.engine._loaded.runner.graphs
    assert graphs is not None
    resample, resampled = graphs.resample, set()

    def noted(wanted: Resampling, *arguments: Any) -> torch.Tensor:
        resampled.add(wanted)
        return resample(wanted, *arguments)

    monkeypatch.setattr(graphs, "resample", noted)
    for kinds in (followed, [*followed, *OTHERS], OTHERS[2:3], OTHERS[:2] + OTHERS[4:5], OTHERS):
        for preempted in (False, True):
            crowd(driver, kinds, preempted=preempted)
            driver.synchronize()  # all that was missed is captured
            resampled.clear()
            from_graphs = crowd(driver, kinds, preempted=preempted)
            assert resampled
            assert {each.extras.constrained for each in resampled} >= ({True} if kinds[0] is followed[0] else {False})
            with monkeypatch.context() as patch:
                patch.setattr(graphs, "can_resample", lambda wanted: False)
                assert crowd(driver, kinds, preempted=preempted) == from_graphs
    assert None not in graphs._captured.values(), "some could not be captured"
    driver.close()


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_every_schema_is_followed(tmp_path: Path, enforce_eager: bool) -> None:
    """Random weights, hundreds of schemas beside sequences without any: every output is one that its grammar takes."""
    copy_shipped(tmp_path)
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
