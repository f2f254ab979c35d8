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

from actors.model_config import ModelConfig
from actors.text_tokenizer import TokenizerError, load_tokenizer
from bus.messages import StructuredOutput

if TYPE_CHECKING:  # imported when the first grammar comes
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"[ \t]|\r?\n[ \t]{0,32}"
"""Between the parts of a JSON text: layouts that people and models use, but no endless blanks."""
THOUGHT = """
thought[suffix="</think>"]: /(?s:.*)/
blanks: /\\s{0,8}/
"""
BEHIND_REASONING = {
    "deepseek_r1": "start: thought blanks @answer" + THOUGHT,
    "qwen3": "start: (/\\s{0,8}<think>/ thought blanks)? @answer" + THOUGHT,
}
"""By what a model's reasoning looks like: see :mod:`web.parsing.reasoning`."""
MAX_ERROR_CHARS = 300
JSON_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
LENGTHS = (5, 10, 15, 30)
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{JSON_CHARACTER}{{1,{most}}}" for most in LENGTHS), f"{JSON_CHARACTER}+"]
"""Tokens that llguidance allows or not all together, where it can. Where a string may have so many characters more,
those that are short enough go together, and only longer ones are looked at. Its own slices know 10 and 30 only; more
lengths than these make every mask slower."""


class GrammarError(Exception):
    """A grammar that cannot be used; the text is for whoever wrote it."""


def write_grammar(wanted: StructuredOutput) -> str:
    """``wanted`` in llguidance's own form.

    Raises:
        GrammarError: it cannot be written so.
    """
    grammar = _write(wanted)
    if not wanted.reasoning:
        return grammar
    parts = json.loads(grammar)["grammars"] if wanted.kind != "grammar" else [{"lark_grammar": grammar}]
    parts[0]["name"] = "answer"
    return json.dumps({"grammars": [{"lark_grammar": BEHIND_REASONING[wanted.reasoning]}, *parts]})


def _write(wanted: StructuredOutput) -> str:
    from llguidance import LLMatcher, grammar_from

    if wanted.kind == "json":
        layout = {"whitespace_pattern": WHITESPACE} if wanted.any_whitespace else {"whitespace_flexible": False}
        try:
            return str(LLMatcher.grammar_from_json_schema(wanted.text, defaults=layout))  # type: ignore[arg-type]
        except ValueError as error:
            raise GrammarError(_short(str(error))) from error
    if wanted.kind == "regex":
        return str(LLMatcher.grammar_from_regex(wanted.text))
    if wanted.kind == "choice":
        return str(LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(wanted.text)))))
    try:
        return grammar_from("grammar", wanted.text)
    except ValueError as error:
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


def _short(text: str) -> str:
    """The part of an error that says what is wrong, without the state of the parser behind it."""
    text = text.split("<state>")[0].strip() or "cannot be used"
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
