"""Grammars that outputs are kept to: JSON schemas, regular expressions, choices, free grammars. The work is done by
llguidance, which follows a grammar byte by byte and says before each token which tokens are possible.

It computes as it goes, so that most grammars are ready within milliseconds, and it counts what it spends on a token: a
grammar that costs too much is an error of the matcher, not a hang. What it does not know of JSON Schema (``not``,
``uniqueItems``) it refuses, so an output that it has led is valid.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.grammars.literals import Literals
from pagebus.actors.model.grammars.schema_checks import BadSchema, check_regex, prepare_schema
from pagebus.actors.model.grammars.structural_tags import TagWriter
from pagebus.actors.model.grammars.thoughts import UnboundedThoughts, before_answer, before_anything, within_anything
from pagebus.actors.model.reasoning import FORMATS
from pagebus.actors.model.tokenizer import TokenizerError, load_tokenizer
from pagebus.bus.messages import StructuredOutput

if TYPE_CHECKING:  # imported when the first grammar comes
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"[ \t]|\r?\n[ \t]{0,32}"
"""Between the parts of a JSON text: layouts that people and models use, but no endless blanks."""
LARK_START = re.compile(r"^\s*start\s*(\[[^\n]*\])?\s*:(?!:=)", re.MULTILINE)
"""What a grammar in Lark has and one in GBNF has not."""
THE_ANSWER = "start: @answer\n"
UNFORCED = '%llguidance {"no_forcing": true}\n'
"""llguidance asks the tokenizer for the tokens of text that has to come, and this takes the name of a special token for
the token. No text is one, so the output could not go on. With this option the model chooses the tokens of the text."""
MAX_ERROR_CHARS = 300
JSON_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
LENGTHS = (5, 10, 15, 30)
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{JSON_CHARACTER}{{1,{most}}}" for most in LENGTHS), f"{JSON_CHARACTER}+"]
"""Tokens that llguidance allows or not all together, where it can. Where a string may have that many more characters,
those that are short enough go together, and only longer ones are looked at. Its own slices know 10 and 30 only; more
lengths than these make every mask slower."""


class GrammarError(Exception):
    """A grammar that cannot be used; the text is for its author."""


def write_grammar(wanted: StructuredOutput, vocabulary: LLTokenizer | None = None) -> str:
    """``wanted`` in llguidance's own form. What is a token of ``vocabulary`` is named as one.

    Raises:
        GrammarError: it cannot be written so.
    """
    literals = Literals(vocabulary)
    try:
        if wanted.kind == "anything":
            return _write_anything(wanted, literals)
        grammar = _write(wanted, literals)
        first = THE_ANSWER
        if wanted.reasoning:
            begun = wanted.prompt_thought is not None
            first = before_answer(FORMATS[wanted.reasoning], literals, wanted.thinking_tokens, begun=begun)
    except UnboundedThoughts:
        raise GrammarError("needs a model whose marks of reasoning are tokens") from None
    if literals.tokens_in(grammar.replace("\\", "")):
        first = UNFORCED + first
    if first == THE_ANSWER:
        return grammar
    parts = [{"lark_grammar": grammar}] if wanted.kind == "grammar" else json.loads(grammar)["grammars"]
    parts[0]["name"] = "answer"
    return json.dumps({"grammars": [{"lark_grammar": first}, *parts]})


def _write_anything(wanted: StructuredOutput, literals: Literals) -> str:
    form, budget = FORMATS[wanted.reasoning], wanted.thinking_tokens or 0
    if wanted.prompt_thought is None:
        return before_anything(form, literals, budget)
    return within_anything(form, literals, budget, wanted.prompt_thought)


def _write(wanted: StructuredOutput, literals: Literals) -> str:
    from llguidance import LLMatcher

    if wanted.kind == "regex":
        return str(LLMatcher.grammar_from_regex(_whole(wanted.text)))
    if wanted.kind == "choice":
        return str(LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(wanted.text)))))
    if wanted.kind == "grammar":
        return _as_lark(wanted.text)
    layout = {"whitespace_pattern": WHITESPACE} if wanted.any_whitespace else {"whitespace_flexible": False}
    try:
        if wanted.kind == "structural_tag":
            writer = TagWriter(literals, _as_lark, layout)
            return json.dumps({"grammars": writer.write(json.loads(wanted.text))}, ensure_ascii=False)
        schema = json.loads(wanted.text)
        prepare_schema(schema)
        text = json.dumps(schema, ensure_ascii=False)
        return str(LLMatcher.grammar_from_json_schema(text, defaults=layout))  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarError(_short(str(error))) from error


def _whole(regex: str) -> str:
    """A regular expression that the engine would cut at its end is refused."""
    try:
        check_regex(regex)
    except BadSchema as error:
        raise GrammarError(str(error)) from None
    return regex


def _as_lark(grammar: str) -> str:
    """A grammar in Lark or GBNF as one in Lark."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if LARK_START.search(grammar):
        return grammar
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # it says so what it cannot read, or runs out of stack
        raise GrammarError(_short(str(error))) from error


def load_vocabulary(folder: Path, config: ModelConfig) -> LLTokenizer:
    """The tokens of the tokenizer in ``folder``, as llguidance needs them. Takes up to a second.

    Raises:
        GrammarError: there is no tokenizer that can be used, or the model has no token that ends a text.
    """
    from llguidance import LLTokenizer

    if not config.eos_token_ids:
        raise GrammarError("this model has no token that ends an output")
    try:
        return LLTokenizer(_tokenizer_text(folder), config.vocab_size, list(config.eos_token_ids), slices=SLICES)
    except (OSError, ValueError, TokenizerError) as error:
        raise GrammarError(f"this model's tokenizer cannot be used for it: {_short(str(error))}") from error


def _tokenizer_text(folder: Path) -> str:
    """The tokenizer as the library of that name writes it; made from other files only where it is not there so."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return path.read_text()
    tokenizer: Any = load_tokenizer(folder)
    if tokenizer is None:
        raise GrammarError("this model has no tokenizer")
    return str(tokenizer.backend_tokenizer.to_str())


def make_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Follows one output from its first token on.

    Raises:
        GrammarError: the grammar is wrong or too complex.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()))
    return matcher


def check_matcher(matcher: LLMatcher) -> None:
    """Compute what a matcher lets through first.

    Raises:
        GrammarError: that is nothing, or costs too much.
    """
    matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()))


REASONS = {
    "NoExtension": "no output is possible",
    "ParserTooComplex": "is too complex",
    "LexerTooComplex": "is too complex",
}
"""llguidance's reasons for the end of a matcher, and their meaning for the grammar's author."""


SCHEMA_WITHIN = "failed to compile JSON schema: "


def _short(text: str) -> str:
    """The part of an error that says what is wrong, without the state of the parser or the stack behind it."""
    text = text.split("<state>")[0].split("<backtrace>")[0].split(" Enable 'coerce_one_of'")[0].strip()
    if SCHEMA_WITHIN in text:  # a grammar that we have written: where in it helps nobody
        text = text.split(SCHEMA_WITHIN)[1].split("\n")[0]
    if not text or text.startswith("panic"):
        return "cannot be used: it is more than the grammar engine can take"
    for name, reason in REASONS.items():
        if text.startswith(name):
            return reason
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
