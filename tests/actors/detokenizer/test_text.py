"""Incremental text against one decode of everything, for every kind of decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from pagebus.actors.detokenizer.text import (
    BYTE_TOKEN,
    HELD_TOKENS,
    ByteLevelDecoder,
    Decoder,
    NoTextDecoder,
    SentencePieceDecoder,
    Vocabulary,
    WindowDecoder,
    make_decoder,
)
from pagebus.actors.model.tokenizer import byte_alphabet
from tests.grids import examples
from tests.helpers.tokenizer_factory import CORPUS, byte_level, sentencepiece


def metaspace() -> Tokenizer:
    """Pieces with a decoder that has no table of its own."""
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def fallback_window() -> Tokenizer:
    """Byte fallback within a decoder that is not quite Llama's."""
    return sentencepiece(extra=[decoders.Replace("qq", "q")])


def wordpiece() -> Tokenizer:
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.WordPiece(prefix="l", cleanup=True)
    return tokenizer


def suffixed() -> Tokenizer:
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.BPEDecoder(suffix="d")
    return tokenizer


def plain() -> Tokenizer:
    tokenizer = sentencepiece()
    tokenizer.decoder = None
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "llama": sentencepiece,
    "gemma": lambda: sentencepiece(strip=False),
    "metaspace": metaspace,
    "fallback window": fallback_window,
    "wordpiece": wordpiece,
    "suffixed": suffixed,
    "plain": plain,
}


@cache
def made(name: str) -> tuple[Tokenizer, Decoder]:
    tokenizer = TOKENIZERS[name]()
    return tokenizer, make_decoder(tokenizer)


def window(tokenizer: Tokenizer) -> Decoder:
    """The general decoder for a tokenizer that has a faster one."""
    steps = str(tokenizer.decoder)
    return WindowDecoder(tokenizer, Vocabulary(tokenizer), byte_fallback="ByteFallback" in steps)


def streamed(decoder: Decoder, context: Sequence[int], output: Sequence[int], skip: bool) -> list[str]:
    """The deltas of one sequence, the last being what was held back."""
    state = decoder.begin(context, skip_special=skip)
    deltas = [decoder.push([state], [token_id])[0] for token_id in output]
    return [*deltas, decoder.finish(state)]


def in_context(tokenizer: Tokenizer, context: Sequence[int], output: Sequence[int], skip: bool) -> str:
    """The text that the whole decode adds to the context's."""
    before = tokenizer.decode(list(context), skip_special_tokens=skip)
    return tokenizer.decode([*context, *output], skip_special_tokens=skip)[len(before) :]


def ends_open(tokenizer: Tokenizer, context: Sequence[int], skip: bool) -> bool:
    """Whether a later token could change the context's own text."""
    tokens = [tokenizer.id_to_token(i) for i in context if not (skip and i in special_ids(tokenizer))]
    text = tokenizer.decode(list(context), skip_special_tokens=skip)
    return text.endswith("�") or bool(tokens and tokens[-1] and BYTE_TOKEN.fullmatch(tokens[-1]))


def special_ids(tokenizer: Tokenizer) -> set[int]:
    return {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def ids(name: str, max_size: int) -> st.SearchStrategy[list[int]]:
    """Token ids of a tokenizer, with many bytes, special tokens and ids it does not know."""
    size = made(name)[0].get_vocab_size()
    some = st.integers(0, size + 3)
    edges = st.sampled_from([*sorted(special_ids(made(name)[0])), size - 1, size - 2])
    low = st.integers(0, min(size, 262) - 1)
    return st.lists(st.one_of(some, low, edges), max_size=max_size)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(120), deadline=None)
@given(data=st.data())
def test_joined_deltas_are_the_whole_decode_for_any_tokens(name: str, data: st.DataObject) -> None:
    """Whatever tokens are sampled, the joined stream equals one decode of everything in context."""
    tokenizer, decoder = made(name)
    skip = data.draw(st.booleans())
    context = data.draw(ids(name, 6))
    if ends_open(tokenizer, context, skip):
        context = []
    output = data.draw(ids(name, 40))

    assert in_context(tokenizer, context, output, skip) == "".join(streamed(decoder, context, output, skip))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_joined_deltas_are_the_whole_decode_for_real_text(name: str, data: st.DataObject) -> None:
    """Encoded text, cut into prompt and output at any token border, streams as it decodes."""
    tokenizer, decoder = made(name)
    text = data.draw(st.text(alphabet="ab ▁é你🎉👩\u200d\n'd.ñ", max_size=24))
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(0, len(tokens)))
    while cut and ends_open(tokenizer, tokens[:cut], True):
        cut -= 1
    context, output = tokens[max(0, cut - 6) : cut], tokens[cut:]

    assert in_context(tokenizer, context, output, True) == "".join(streamed(decoder, context, output, True))


@pytest.mark.parametrize("name", ["byte level", "llama", "gemma"])
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_tables_and_windows_agree(name: str, data: st.DataObject) -> None:
    """The fast decoders give the same text as the general one."""
    tokenizer, decoder = made(name)
    output = data.draw(ids(name, 30))

    assert "".join(streamed(window(tokenizer), [], output, True)) == "".join(streamed(decoder, [], output, True))


def test_the_fastest_exact_decoder_is_chosen() -> None:
    """Known decoders get tables, others the window, a model without tokenizer none."""
    kinds = {name: type(made(name)[1]) for name in TOKENIZERS}

    assert {
        "byte level": ByteLevelDecoder,
        "llama": SentencePieceDecoder,
        "gemma": SentencePieceDecoder,
        "metaspace": WindowDecoder,
        "fallback window": WindowDecoder,
        "wordpiece": WindowDecoder,
        "suffixed": WindowDecoder,
        "plain": WindowDecoder,
    } == kinds
    assert isinstance(make_decoder(None), NoTextDecoder)


def test_many_sequences_in_one_call_do_not_mix() -> None:
    """A batch gives each sequence what it gets alone."""
    for name in TOKENIZERS:
        tokenizer, decoder = made(name)
        outputs = [tokenizer.encode(text, add_special_tokens=False).ids[:20] for text in CORPUS[:3]]
        states = [decoder.begin([]) for _ in outputs]
        together = ["", "", ""]
        for step in range(20):
            rows = [i for i, output in enumerate(outputs) if step < len(output)]
            texts = decoder.push([states[i] for i in rows], [outputs[i][step] for i in rows])
            for i, text in zip(rows, texts, strict=True):
                together[i] += text
        together = [text + decoder.finish(state) for text, state in zip(together, states, strict=True)]

        assert ["".join(streamed(decoder, [], output, True)) for output in outputs] == together


def test_half_a_character_is_held_back_and_then_comes_whole() -> None:
    """No delta ever shows a replacement character for a character that is still arriving."""
    tokenizer, decoder = made("byte level")
    output = [token_id for byte in "é🎉".encode() for token_id in [byte_token(tokenizer, byte)]]

    assert streamed(decoder, [], output, True) == ["", "é", "", "", "", "🎉", ""]


def test_half_a_character_at_the_end_is_flushed_as_a_replacement_character() -> None:
    """What never became a character appears once, as decode shows it."""
    tokenizer, decoder = made("byte level")
    output = [byte_token(tokenizer, byte) for byte in "🎉".encode()[:3]]

    assert streamed(decoder, [], output, True) == ["", "", "", "�"]


def test_character_begun_in_the_prompt_is_completed_by_the_output() -> None:
    """A prompt of token ids may end inside a character."""
    for name in ("byte level", "llama", "fallback window"):
        tokenizer, decoder = made(name)
        tokens = [byte_token(tokenizer, byte) for byte in "🎉".encode()]

        assert "".join(streamed(decoder, tokens[:2], tokens[2:], True)) == "🎉"
        assert "".join(streamed(decoder, tokens, [], True)) == ""


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    """Only text at the very beginning loses the space that the tokenizer put there."""
    tokenizer, decoder = made("llama")
    hello, bos = tokenizer.token_to_id("▁Hello"), tokenizer.token_to_id("<s>")

    assert "".join(streamed(decoder, [hello], [hello], True)) == " Hello"
    assert "".join(streamed(decoder, [bos], [hello], True)) == "Hello"
    assert "".join(streamed(decoder, [bos], [hello], False)) == " Hello"


def test_special_tokens_show_only_when_asked_for() -> None:
    """skip_special_tokens False gives them as text."""
    tokenizer, decoder = made("byte level")
    output = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<think>")]

    assert "".join(streamed(decoder, [], output, True)) == "<think>"
    assert "".join(streamed(decoder, [], output, False)) == "<|im_end|><think>"


def test_no_space_between_special_tokens_when_not_wanted() -> None:
    """A decoder that puts spaces between tokens leaves them out between added tokens."""
    tokenizer, decoder = made("plain")
    output = [tokenizer.token_to_id(token) for token in ("a", "<s>", "</s>", "b")]

    def text(spaces: bool) -> str:
        state = decoder.begin([], skip_special=False, spaces=spaces)
        return "".join(decoder.push([state], [i])[0] for i in output) + decoder.finish(state)

    assert text(spaces=True) == "a <s> </s> b"
    assert text(spaces=False) == "a <s></s> b"


def test_endless_garbage_is_not_held_for_ever() -> None:
    """A window that never becomes text is let go, so that its cost stays bounded."""
    tokenizer, decoder = made("fallback window")
    state = decoder.begin([])
    token = byte_token(tokenizer, 0xFF)
    held = max(len(state.ids) for _ in range(500) if decoder.push([state], [token]) is not None)

    assert held <= 2 * HELD_TOKENS + 2


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """The token of a single byte."""
    token_id = tokenizer.token_to_id(f"<0x{byte:02X}>")
    if token_id is None:
        token_id = tokenizer.token_to_id(next(c for c, b in byte_alphabet().items() if b == byte))
    assert token_id is not None
    return token_id
