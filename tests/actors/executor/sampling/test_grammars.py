"""Sequences that are kept to a grammar, with random weights: whatever these say, the outputs are valid."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tokenizers import Tokenizer

import pagebus.actors.shipped_model
from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.grammars.grammar import write_grammar
from pagebus.bus.messages import END_GRAMMAR, END_STOP, StructuredOutput
from tests.actors.executor.eager_graphs import use_eager_graphs
from tests.helpers.engine_driver import Driver, Grown
from tests.helpers.json_schemas import schemas

SHIPPED = Path(pagebus.actors.shipped_model.__file__).parent
SMALL = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1,
}  # fmt: skip
TOKENIZER = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
PROMPT = TOKENIZER.encode("What is a dog?").ids
MAX_TOKENS = 900
LETTERS = {"kind": "regex", "text": "([a-z]{3} ){9}[a-z]{3}"}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((SHIPPED / "config.json").read_text()) | SMALL
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder)
    driver = Driver(
        folder, device="cpu", dtype="float32", threads=1, load_format="dummy", max_model_len=1024, max_num_seqs=100,
        max_num_batched_tokens=1024, num_gpu_blocks_override=6500,
    )  # fmt: skip
    yield driver
    driver.close()


def constrained(**wanted: Any) -> dict[str, Any]:
    """Parameters of a sequence that is to be something."""
    grammar = write_grammar(StructuredOutput(field="test", **wanted))
    return {"grammar": grammar, "end_token_ids": ModelConfig.load(SHIPPED).eos_token_ids}


def text_of(sequence: Grown) -> str:
    """What it says before its end token."""
    text: str = TOKENIZER.decode(sequence.output[:-1], skip_special_tokens=False)
    return text


def test_every_schema_is_followed(driver):
    """Hundreds of schemas at once, sampled almost evenly, four steps planned ahead: every output is valid and whole."""
    wanted = schemas()
    scheduler = driver.scheduler()
    sequences = {
        name: scheduler.add(
            PROMPT, MAX_TOKENS, temperature=1.0, seed=seed, **constrained(kind="json", text=json.dumps(schema))
        )
        for seed, (name, schema) in enumerate(wanted.items())
    }

    driver.drive(scheduler, depth=4)

    assert len(wanted) >= 200
    assert {name: sequence.end for name, sequence in sequences.items() if sequence.end != END_STOP} == {}
    wrong = {
        name: text_of(sequence)
        for name, sequence in sequences.items()
        if not jsonschema_rs.is_valid(wanted[name], json.loads(text_of(sequence)))
    }
    assert wrong == {}


def test_every_lane_says_the_same(driver):
    """Sequences of one grammar and seed, which are followed by different matchers, say the same."""
    scheduler = driver.scheduler()
    params = {"temperature": 1.0, "seed": 5, **constrained(**LETTERS)}
    sequences = [scheduler.add(PROMPT, 60, **params) for _ in range(9)]

    driver.drive(scheduler, depth=4)

    assert [sequence.output for sequence in sequences] == [sequences[0].output] * 9
    assert sequences[0].end == END_STOP


def test_a_preempted_sequence_goes_on(driver):
    """A sequence that is computed again, with the tokens it has, goes on as if nothing had happened."""
    scheduler = driver.scheduler()
    whole = scheduler.add(PROMPT, 60, temperature=1.0, seed=5, **constrained(**LETTERS))
    driver.drive(scheduler)
    again = scheduler.add(PROMPT, 60, temperature=1.0, seed=5, **constrained(**LETTERS))
    again.output = whole.output[:9]

    driver.drive(scheduler)

    assert again.output == whole.output
    assert jsonschema_rs.is_valid({"pattern": f"^{LETTERS['text']}$"}, text_of(again))


@pytest.mark.parametrize("again", [1, 9, 30])
def test_a_sequence_comes_back_to_its_slot(driver, again):
    """Alone in its batch it gets the same slot again, with no other step between: nothing is followed twice."""
    scheduler = driver.scheduler()
    params: dict[str, Any] = {"temperature": 1.0, "seed": 5, **constrained(kind="regex", text="[0-9]{40}")}
    whole = scheduler.add(PROMPT, 60, **params)
    driver.drive(scheduler)
    sequence = scheduler.add(PROMPT, 60, **params)

    def preempt(_: object) -> None:
        if len(sequence.output) == again:
            scheduler.preempt(sequence)
            scheduler.free_slots.sort(key=lambda slot: slot != sequence.slot)

    driver.drive(scheduler, depth=1, on_result=preempt)

    assert sequence.output == whole.output
    assert re.fullmatch("[0-9]{40}", text_of(sequence))


def test_a_slot_forgets_its_grammar(driver):
    """A sequence without a grammar says the same whether one with a grammar had its slot before or is beside it."""
    fresh, used = driver.scheduler(), driver.scheduler()
    params: dict[str, Any] = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5}
    alone = fresh.add(PROMPT, 30, **params)
    driver.epoch -= 1
    driver.drive(fresh)
    driver.epoch += 1
    before = used.add(PROMPT, 60, temperature=1.0, seed=5, **constrained(**LETTERS))
    driver.drive(used)
    after = used.add(PROMPT, 30, **params)
    beside = used.add(PROMPT, 60, temperature=1.0, seed=5, **constrained(**LETTERS))

    driver.drive(used)

    assert after.output == alone.output
    assert beside.output == before.output


def test_graphs_change_nothing(driver, monkeypatch):
    """Sequences with grammars, beside others with other wishes and with none, say the same where their steps are padded
    and all rows of a step are sampled again."""
    others: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_p": 0.8}, {"presence_penalty": 0.5}]

    def run() -> list[list[int]]:
        scheduler = driver.scheduler(64)
        for i in range(24):
            wanted = constrained(**LETTERS) | {"temperature": i % 4 / 2}
            scheduler.add(PROMPT, 60, seed=i, **(wanted if i % 2 else others[i // 2 % 3]))
        leaving = [scheduler.all[6]]

        def preempt(_: object) -> None:
            if leaving and len(leaving[0].output) == 9:
                scheduler.preempt(leaving.pop())

        driver.drive(scheduler, depth=1, on_result=preempt)
        assert not leaving
        return [sequence.output for sequence in scheduler.all.values()]

    plain = run()
    graphs = use_eager_graphs(driver, monkeypatch, Buckets(100, 256, 16))

    assert run() == plain
    assert {each.extras.constrained for each in graphs.resampled} == {True, False}


def test_a_grammar_that_cannot_be_followed_ends_its_sequence_alone(driver):
    """It is told by the sequence's end; others go on."""
    scheduler = driver.scheduler()
    broken = scheduler.add(PROMPT, 20, grammar='start: "never" unknown', end_token_ids=(4,))
    other = scheduler.add(PROMPT, 20, temperature=1.0, seed=5)

    driver.drive(scheduler)

    assert (broken.end, len(broken.output)) == (END_GRAMMAR, 1)
    assert len(other.output) == 20
