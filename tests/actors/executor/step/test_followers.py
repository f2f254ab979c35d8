"""Whose tokens are whose: sequences leave the batch and enter it again while steps with them are under way.

Masks are compared with those of a matcher that is given all tokens of the sequence, so that one that is followed twice,
or not at all, shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import pagebus.actors.shipped_model
from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.sampling import grammars
from pagebus.actors.executor.sampling.grammars import Grammars
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.grammars.grammar import load_vocabulary, make_matcher, write_grammar
from pagebus.bus.messages import StepPlan, StructuredOutput
from tests.helpers.engine_driver import Grown, ints, new_sequence
from tests.helpers.waiting import until

SHIPPED = Path(pagebus.actors.shipped_model.__file__).parent
CONFIG = ModelConfig.load(SHIPPED)
VOCABULARY = load_vocabulary(SHIPPED, CONFIG)
DIGITS = write_grammar(StructuredOutput(kind="regex", text="[0-9]{5}", field="test"))
ABC = write_grammar(StructuredOutput(kind="regex", text="a(b(c(d(e(f)?)?)?)?)?", field="test"))
TOKEN = {letter: VOCABULARY.tokenize_str(letter)[0] for letter in "abcdef0123"}
END = CONFIG.eos_token_ids[0]


class Batch:
    """Slots of one executor: what is planned and sampled there, as the engine tells it."""

    def __init__(self) -> None:
        limits = BatchLimits(
            max_num_seqs=8, max_model_len=64, max_num_batched_tokens=64, block_size=16, num_blocks=8,
            vocab_size=CONFIG.vocab_size,
        )  # fmt: skip
        self.grammars = Grammars(limits, lambda: VOCABULARY, CONFIG.eos_token_ids, pinned=False)
        self.ids: dict[int, int] = {}

    def enter(self, slot: int, sequence_id: int, grammar: str, output: str = "", freed: tuple[int, ...] = ()) -> None:
        """A sequence with a prompt of one token comes in, others go."""
        grown = Grown(sequence_id, [1], 20, {"grammar": grammar}, slot=slot, output=[TOKEN[each] for each in output])
        plan = StepPlan(
            step=1, planned_s=0.0, num_decodes=0, freed_slots=ints(freed), new_sequences=(new_sequence(grown),),
            new_token_ids=ints([1, *grown.output]),
        )  # fmt: skip
        self.ids[slot] = sequence_id
        self.grammars.prepare(plan)
        self.grammars.apply(plan)

    def launch(self, *slots: int) -> list[set[str]]:
        """A step is launched in which these slots sample: the letters that each may have ("." is the end)."""
        rows, none = ints(range(len(slots))), ints([])
        work = StepWork(
            num_decodes=len(slots), num_tokens=len(slots), max_query_len=1, max_context_len=1, slots=ints(slots),
            starts=none, query_start=none, positions=rows, indexes=none, hidden_index=none, context_lens=none,
            sample_slots=ints(slots), sequence_ids=ints([self.ids[slot] for slot in slots]), length_ended=none,
            can_stop=none, end_ids=none, deltas={}, constrained=rows,
        )  # fmt: skip
        masks = self.grammars.masks(work).numpy().copy()
        self.grammars.launched(work)
        assert work.broken == []
        return [letters(mask) for mask in masks]

    def land(self, *tokens: str) -> None:
        """The tokens of the oldest step that has not landed yet."""
        self.grammars.landed(ints([END if each == "." else TOKEN[each] for each in tokens]))


def letters(mask: np.ndarray) -> set[str]:
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: CONFIG.vocab_size]
    return {letter for letter, token in TOKEN.items() if allowed[token]} | ({"."} if allowed[END] else set())


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Batch]:
    monkeypatch.setattr(grammars, "MAX_YIELD_S", 3600.0)  # who waits for nothing hangs
    batch = Batch()
    yield batch
    batch.grammars.close()


def test_letters_are_tokens():
    """What the other tests take for granted."""
    matcher = make_matcher(VOCABULARY, ABC)
    assert matcher.consume_tokens([TOKEN[each] for each in "abc"])
    assert letters(np.frombuffer(matcher.compute_bitmask(), np.int32)) == {"d", "."}


def test_a_sequence_comes_back_to_its_slot_with_no_mask_between(batch):
    """Preempted or asked for anew, alone in its batch: its last token has come, and nobody has looked at it yet."""
    batch.enter(0, 1, ABC)
    batch.launch(0)
    batch.land("a")
    batch.launch(0)
    batch.land("b")
    batch.enter(0, 1, ABC, "ab", freed=(0,))

    assert batch.launch(0) == [{"c", "."}]
    batch.land("c")
    assert batch.launch(0) == [{"d", "."}]


def test_where_any_token_may_come_twice(batch):
    """Then nothing fails, and the output would be one digit short."""
    batch.enter(0, 1, DIGITS)
    batch.launch(0)
    batch.land("0")
    batch.enter(0, 1, DIGITS, "0", freed=(0,))
    for digit in "123":
        assert "." not in batch.launch(0)[0]
        batch.land(digit)

    assert batch.launch(0) == [set("0123")]
    batch.land("1")
    assert batch.launch(0) == [{"."}]


def test_a_sequence_comes_back_before_its_token(batch):
    """It is computed again from what was known when it left: what was under way then is sampled anew."""
    batch.enter(0, 1, ABC)
    batch.launch(0)
    batch.enter(0, 1, ABC, freed=(0,))
    batch.land("a")

    assert batch.launch(0) == [{"a"}]


def test_a_sequence_comes_back_to_another_slot(batch):
    """Its old slot is another one's by then."""
    batch.enter(0, 1, ABC)
    batch.launch(0)
    batch.land("a")
    batch.enter(3, 1, ABC, "a", freed=(0,))
    batch.enter(0, 2, ABC)

    assert batch.launch(0, 3) == [{"a"}, {"b", "."}]
    batch.land("a", "b")
    assert batch.launch(3, 0) == [{"c", "."}, {"b", "."}]


def test_another_scheduler_gives_the_same_ids(batch):
    """Sequences of two schedulers have nothing in common but their numbers."""
    batch.enter(0, 1, ABC)
    batch.launch(0)
    batch.grammars.reset()
    batch.enter(0, 1, ABC, "ab")
    batch.land("a")

    assert batch.launch(0) == [{"c", "."}]
    batch.land("c")
    assert batch.launch(0) == [{"d", "."}]


def test_one_of_two_comes_back(batch):
    """The other goes on in the same steps."""
    batch.enter(0, 1, ABC)
    batch.enter(1, 2, ABC)
    batch.launch(0, 1)
    batch.land("a", "a")
    batch.launch(0, 1)
    batch.enter(0, 1, ABC, "a", freed=(0,))
    batch.land("b", "b")

    assert batch.launch(1) == [{"c", "."}]
    batch.land("c")
    assert batch.launch(0, 1) == [{"b", "."}, {"d", "."}]


def test_what_has_ended_is_not_followed(batch):
    """Steps that were planned ahead sample whatever they like, until its slot is free."""
    batch.enter(0, 1, ABC)
    for token in "ab.":
        batch.launch(0)
        batch.land(token)

    assert batch.launch(0) == [set(TOKEN) | {"."}]
    batch.land("f")
    batch.enter(0, 1, ABC, "ab", freed=(0,))
    assert batch.launch(0) == [{"c", "."}]


def test_nobody_waits_for_tokens_that_will_not_come(batch):
    """The device thread ends with the thread that it waits for."""
    batch.enter(0, 1, ABC)
    batch.launch(0)
    batch.grammars.close()

    with pytest.raises(EngineError, match="no tokens"):
        batch.launch(0)


async def test_the_device_thread_goes_first(batch, monkeypatch):
    """Whoever brings tokens that it waits for goes on when they are followed."""
    told: list[str] = []
    catch_up = Grammars._catch_up

    def followed(self: Grammars) -> None:
        catch_up(self)
        told.append("followed")

    monkeypatch.setattr(Grammars, "_catch_up", followed)
    batch.enter(0, 1, ABC)
    batch.launch(0)
    with ThreadPoolExecutor(1) as device:
        asked = device.submit(batch.launch, 0)
        await until(lambda: batch.grammars._waits)
        batch.land("a")
        assert told == ["followed"] * 2
        assert asked.result() == [{"b", "."}]
    batch.land("b")
    assert batch.launch(0) == [{"c", "."}]
