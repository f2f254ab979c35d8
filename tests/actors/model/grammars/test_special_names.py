"""Outputs in which the name of a special token has to stand: it is text, and never the token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pagebus.actors.shipped_model
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.grammars.grammar import load_vocabulary, make_matcher, write_grammar
from pagebus.bus.messages import StructuredOutput

FOLDER = Path(pagebus.actors.shipped_model.__file__).parent
VOCABULARY = load_vocabulary(FOLDER, ModelConfig.load(FOLDER))
SPECIAL = {0, 1, 2, 3, 4}


def likeliest(**wanted: object) -> str:
    """What a model writes that likes special tokens most, then the longest of all possible tokens."""
    matcher = make_matcher(VOCABULARY, write_grammar(StructuredOutput(field="test", **wanted), VOCABULARY))
    written = []
    while not matcher.is_stopped():
        possible = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        assert not matcher.is_error()
        if matcher.is_accepting():
            break
        token = max(possible.tolist(), key=lambda each: (each in SPECIAL, len(VOCABULARY.decode_bytes([each]))))
        assert matcher.consume_token(token)
        written.append(token)
    assert not SPECIAL.intersection(written)
    return str(VOCABULARY.decode_str(written))


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("choice", '["<|end|>"]', "<|end|>"),
        ("choice", '["a<|user|>b"]', "a<|user|>b"),
        ("regex", r"<\|user\|>b", "<|user|>b"),
        ("grammar", 'start: "<|user|>" "b"', "<|user|>b"),
        ("json", '{"const": "<|user|>"}', '"<|user|>"'),
    ],
)
def test_a_name_is_text(kind, text, expected):
    """Where nothing else is possible, too."""
    assert likeliest(kind=kind, text=text) == expected


def test_beside_reasoning():
    """An answer behind reasoning keeps its names as text."""
    wanted = StructuredOutput(kind="choice", text='["<|user|>"]', field="test", reasoning="qwen3")
    matcher = make_matcher(VOCABULARY, write_grammar(wanted, VOCABULARY))
    tokens = [token for char in "</think><|user|>" for token in VOCABULARY.tokenize_str(char)]
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
