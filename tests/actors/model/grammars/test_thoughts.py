"""Reasoning in front of outputs that follow a grammar, with tokenizers as real models have them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.grammars.grammar import GrammarError, load_vocabulary, make_matcher, write_grammar
from pagebus.actors.tokenizer.thoughts import behind_prompt, thought_in
from pagebus.bus.messages import StructuredOutput
from tests.helpers.tokenizer_factory import byte_level, model_folder

MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>")
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
CALLS = '{"type": "array", "minItems": 1, "items": {"properties": {"name": {"const": "f"}}, "required": ["name"]}}'
THOUGHT = "well } {\n<b> 5 </th"
TEXTS = {  # around a thought, and what stands in front of an answer without one (None: there has to be a thought)
    "deepseek_r1": ("", "</think>\n\n", None),
    "deepseek_v3": ("<think>", "</think>", None),
    "glm45": ("\n<think>", "</think>\n", None),
    "granite": ("Here is my thought process:", "Here's my response:\n", ""),
    "kimi_k2": ("", "</think>", None),
    "mistral": ("[THINK]", "[/THINK]", ""),
    "openai_gptoss": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>final<|message|>",
    ),
    "qwen3": ("<think>\n", "\n</think>\n\n", None),
}
OUTPUTS = [
    ("json", SCHEMA, '{"a": 12}', '{"a": "b"}'),
    ("json", CALLS, '[{"name": "f"}]', "[]"),
    ("regex", "[0-9]{2}", "12", "123"),
    ("choice", '["a.b", "(c"]', "(c", "c"),
    ("grammar", 'root ::= "<" [a-z] ">"', "<a>", "<1>"),
    ("grammar", 'start: "<" /[a-z]/ ">"', "<a>", "<1>"),
]


@dataclass(frozen=True)
class Model:
    """A tokenizer, and the vocabulary that llguidance makes of its files."""

    tokenizer: Tokenizer
    vocabulary: LLTokenizer

    def matcher(self, **wanted: object) -> LLMatcher:
        output = StructuredOutput(field="test", **wanted)
        return make_matcher(self.vocabulary, write_grammar(output, self.vocabulary))

    def accepts(self, output: str, **wanted: object) -> bool:
        """Whether the tokens that a model would write for ``output`` are one that is complete."""
        matcher, tokens = self.matcher(**wanted), self.tokenizer.encode(output, add_special_tokens=False).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def token(self, mark: str) -> int | None:
        """The token that a mark is, if it is one that is no text."""
        token = self.tokenizer.token_to_id(mark)
        return token if token is not None and self.vocabulary.is_special_token(token) else None

    def spelled(self, text: str) -> list[int]:
        """Tokens of ``text``, a character each."""
        return [token for char in text for token in self.vocabulary.tokenize_str(char)]


def tokenizer_with(kind: str) -> Tokenizer:
    """Marks as added tokens that are not special (as Qwen3's), as special ones (as Mistral's), or as plain text."""
    tokenizer = byte_level()
    if kind == "added":
        tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    elif kind == "special":
        tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return tokenizer


@pytest.fixture(scope="module", params=["added", "special", "text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    tokenizer = tokenizer_with(request.param)
    if request.param == "text":  # nor is the one that the factory adds
        tokenizer = Tokenizer.from_str(tokenizer.to_str().replace('"<think>"', '"<thought>"'))
    end = tokenizer.token_to_id("</s>")
    folder = model_folder(
        tmp_path_factory.mktemp(request.param), tokenizer, vocab_size=tokenizer.get_vocab_size(), eos_token_id=end
    )
    return Model(tokenizer, load_vocabulary(Path(folder), ModelConfig.load(folder)))


@pytest.mark.parametrize(("kind", "text", "good", "bad"), OUTPUTS)
@pytest.mark.parametrize("reasoning", TEXTS)
def test_outputs_behind_reasoning(model, reasoning, kind, text, good, bad):
    """Whatever the marks are to the tokenizer: the model thinks, then its output is what it has to be."""
    wanted = {"kind": kind, "text": text, "reasoning": reasoning}
    opens, closes, instead = TEXTS[reasoning]

    assert model.accepts(opens + THOUGHT + closes + good, **wanted)
    assert model.accepts(opens + closes + good, **wanted)
    assert not model.accepts(opens + THOUGHT + closes + bad, **wanted)
    assert not model.accepts(opens + THOUGHT, **wanted)
    assert model.accepts((instead or "") + good, **wanted) is (instead is not None)


def test_a_mark_that_is_a_token_is_not_written_as_text(model):
    """It would be read as the mark, with a part of the thought as the answer."""
    matcher = model.matcher(kind="regex", text="[0-9]", reasoning="deepseek_r1")
    tokens = model.spelled("so </think>5")
    is_token = model.token("</think>") is not None

    assert matcher.try_consume_tokens(tokens) == (len(tokens) - 2 if is_token else len(tokens))


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize(
    ("opens", "reasoning"), [("<think>", "deepseek_r1"), ("<think>", "qwen3"), ("[THINK]", "mistral")]
)
def test_a_budget_of_thoughts(model, budget, opens, reasoning):
    """After so many tokens the mark has to come, in front of a structured output and of any other."""
    mark = model.token("[/THINK]" if opens == "[THINK]" else "</think>")
    opened = model.tokenizer.encode(opens, add_special_tokens=False).ids
    for wanted in ({"kind": "regex", "text": "[0-9]"}, {"kind": "anything", "text": ""}):
        wanted = {**wanted, "reasoning": reasoning, "thinking_tokens": budget}
        if mark is None:
            with pytest.raises(GrammarError, match="are tokens"):
                model.matcher(**wanted)
            continue
        matcher = model.matcher(**wanted)
        thought = model.spelled("s" * budget)
        assert matcher.consume_tokens(opened + thought)
        assert allowed_tokens(matcher, model) == {mark}
        assert matcher.consume_tokens([mark, *model.spelled("5")])
        assert matcher.is_accepting()


def test_whatever_comes_behind_a_budget(model):
    """A model that has closed its thought may write anything, tokens that are no text included; or end at once."""
    mark, special = model.token("</think>"), model.tokenizer.token_to_id("<|im_start|>")
    if mark is None:
        pytest.skip("marks are no tokens here")
    matcher = model.matcher(kind="anything", text="", reasoning="qwen3", thinking_tokens=9)

    assert matcher.consume_tokens([*model.spelled("so"), special, mark, special, *model.spelled("\\n} </think>"), mark])
    assert len(allowed_tokens(matcher, model)) == model.tokenizer.get_vocab_size()


@pytest.mark.parametrize(("num_thought", "left"), [(0, 5), (2, 3), (5, 0), (9, 0)])
def test_a_budget_behind_a_prompt_that_thinks(model, num_thought, left):
    """What the prompt has used up of it counts; then the mark has to come, in front of any output."""
    mark = model.token("</think>")
    for wanted in ({"kind": "regex", "text": "[0-9]"}, {"kind": "anything", "text": ""}):
        output = StructuredOutput(field="f", reasoning="qwen3", thinking_tokens=5, prompt_thought=-1, **wanted)
        resolved = behind_prompt(output, num_thought)
        if mark is None:
            with pytest.raises(GrammarError, match="are tokens"):
                write_grammar(resolved, model.vocabulary)
            continue
        matcher = make_matcher(model.vocabulary, write_grammar(resolved, model.vocabulary))
        assert matcher.consume_tokens(model.spelled("s" * left))
        assert allowed_tokens(matcher, model) == {mark}
        assert matcher.consume_tokens([mark, *model.spelled("5")])
        assert matcher.is_accepting()


def test_a_thought_may_end_the_output(model):
    """Where there is room left in its budget: then nothing of the output is an answer."""
    if model.token("</think>") is None:
        pytest.skip("marks are no tokens here")
    for num_thought in (None, 1):
        wanted = StructuredOutput(
            kind="anything", text="", field="f", reasoning="qwen3", thinking_tokens=3, prompt_thought=num_thought
        )
        matcher = make_matcher(model.vocabulary, write_grammar(wanted, model.vocabulary))
        assert matcher.consume_tokens(model.spelled("s"))
        assert matcher.is_accepting()


def test_a_budget_behind_a_prompt_that_does_not_think(model):
    """The model writes what it likes; but each time that it begins to think, it has so many tokens for it."""
    wanted = StructuredOutput(
        kind="anything", text="", field="f", reasoning="qwen3", thinking_tokens=2, prompt_thought=-1
    )
    opens, closes = model.token("<think>"), model.token("</think>")
    if opens is None:
        with pytest.raises(GrammarError, match="are tokens"):
            write_grammar(behind_prompt(wanted, -1), model.vocabulary)
        return
    matcher = make_matcher(model.vocabulary, write_grammar(behind_prompt(wanted, -1), model.vocabulary))
    for _ in range(2):
        assert matcher.consume_tokens([*model.spelled("so it goes"), closes])
        assert len(allowed_tokens(matcher, model)) == model.tokenizer.get_vocab_size()
        assert matcher.consume_tokens([opens, *model.spelled("ab")])
        assert allowed_tokens(matcher, model) == {closes}
        assert matcher.consume_tokens([closes])


def test_a_structured_output_behind_a_prompt():
    """Comes at once where the prompt does not think."""
    wanted = StructuredOutput(
        kind="regex", text="a", field="f", reasoning="qwen3", thinking_tokens=7, prompt_thought=-1
    )
    assert behind_prompt(wanted, -1) == StructuredOutput(kind="regex", text="a", field="f")


@pytest.mark.parametrize(
    ("reasoning", "text", "count"),
    [
        ("qwen3", "ab", -1),
        ("qwen3", "<think>", 0),
        ("qwen3", "ab<think>cd", 2),
        ("qwen3", "<think>ab</think>c", -1),
        ("qwen3", "<think>ab</think>c<think>def", 3),
        ("qwen3", "</think>", -1),
        ("mistral", "<think>ab", -1),
        ("mistral", "[THINK]ab", 2),
        ("granite", "Here is my thought process:ab", -1),
    ],
)
def test_thoughts_in_a_prompt(reasoning, text, count):
    """Are those behind the last mark that opens, unless one that closes follows."""
    tokenizer = tokenizer_with("added")
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    assert thought_in(ids, tokenizer, reasoning) == count


def allowed_tokens(matcher: LLMatcher, model: Model) -> set[int]:
    bits = matcher.compute_bitmask()
    return {token for token in range(model.vocabulary.vocab_size) if bits[token // 8] >> (token % 8) & 1}
