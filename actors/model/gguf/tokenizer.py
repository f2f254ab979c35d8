"""Builds the tokenizer of a GGUF file: byte pairs as in GPT-2, or SentencePiece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.gguf.header import GgufFile
from pagebus.actors.model.gguf.splits import SPLITS, Split
from pagebus.actors.model.gguf.tokens import PREFIX, Kind, token_id, tokens_of

BLANK = "▁"
"""A space in SentencePiece's tokens."""
BYTE_PAIRS, SENTENCE_PIECE = "gpt2", "llama"
MOST_CHARACTERS = 1000
"""The longest token of SentencePiece: each character is searched for merges. No tokenizer comes near."""
SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
           "pad_token": "padding_token_id"}  # fmt: skip
NO_RSTRIP = ("<s>", "<unk>", "<|endoftext|>")
"""The only control tokens of Phi-3 that do not take the spaces behind them."""


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The file's tokenizer.

    Raises:
        ModelError: a kind of tokenizer that is not read, or lists that do not fit together.
    """
    kind = file.metadata.get(f"{PREFIX}.model")
    if kind == BYTE_PAIRS:
        return _byte_pairs(file)
    if kind == SENTENCE_PIECE:
        return _sentence_piece(file)
    raise ModelError(f"{file.path}: {PREFIX}.model {kind!r} is not read (only {BYTE_PAIRS} and {SENTENCE_PIECE})")


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The fields of ``tokenizer_config.json``: tokens with a role, and the chat template. Raises ModelError."""
    texts, _ = tokens_of(file)
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in SPECIAL.items():
        index = token_id(file, key)
        if index is not None:
            found[name] = texts[index]
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        found["chat_template"] = str(template)
    return found


def has_tokenizer(file: GgufFile) -> bool:
    """Whether the file has tokens."""
    return bool(file.metadata.get(f"{PREFIX}.tokens"))


def _byte_pairs(file: GgufFile) -> Tokenizer:
    name = file.metadata.get(f"{PREFIX}.pre", "default")
    split = SPLITS.get(str(name))
    if split is None:
        raise ModelError(f"{file.path}: {PREFIX}.pre {name!r} is not read (only {', '.join(SPLITS)})")
    texts, kinds = tokens_of(file)
    merges = [_pair(file, merge) for merge in _list(file, "merges", str)]
    tokenizer = _bpe(file, texts, merges, ignore_merges=split.whole)
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cut(split)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, texts, kinds)
    _begin_with_bos(tokenizer, file, default=split.bos)
    return tokenizer


def _cut(split: Split) -> pre_tokenizers.PreTokenizer:
    if split.pattern is None:
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, plain]) if split.digits else plain
    parts = pre_tokenizers.Split(Regex(split.pattern), "isolated")
    return pre_tokenizers.Sequence([parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    """The space between the two parts: not the first character, which may be part of a token."""
    first, space, second = merge.partition(" ") if not merge.startswith(" ") else (merge[:1], "", "")
    if not space or not second or " " in second:
        raise ModelError(f"{file.path}: {PREFIX}.merges has {merge[:40]!r}, which is no pair")
    return first, second


def _sentence_piece(file: GgufFile) -> Tokenizer:
    texts, kinds = tokens_of(file)
    both = zip(texts, kinds, strict=True)
    texts = [text if kind == Kind.CONTROL else text.replace(" ", BLANK) for text, kind in both]
    longest = max(texts, key=len, default="")
    if len(longest) > MOST_CHARACTERS:
        found = f"{len(longest)} characters ({longest[:40]!r}...)"
        raise ModelError(f"{file.path}: {PREFIX}.tokens has a token of {found}, more than {MOST_CHARACTERS}")
    unknown = token_id(file, "unknown_token_id")
    merges = find_merges(texts, _ranks(file, texts))
    tokenizer = _bpe(
        file, texts, merges, unk_token=None if unknown is None else texts[unknown], fuse_unk=True, byte_fallback=True
    )
    prefix = bool(file.metadata.get(f"{PREFIX}.add_space_prefix", True))
    spaces = normalizers.Replace(" ", BLANK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), spaces]) if prefix else spaces
    parts = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    _add_tokens(tokenizer, texts, kinds, takes_spaces=file.metadata.get("general.architecture") == "phi3")
    _begin_with_bos(tokenizer, file, default=True)
    return tokenizer


def _ranks(file: GgufFile, texts: Sequence[str]) -> list[float]:
    """Which tokens are merged first: those of the largest scores, or in Gemma's files the first."""
    scores = _list(file, "scores", float)
    if len(scores) != len(texts):
        raise ModelError(f"{file.path}: {PREFIX}.scores has {len(scores)} numbers for {len(texts)} tokens")
    gemma = str(file.metadata.get("general.architecture")).startswith("gemma")
    return [float(index) for index in range(len(texts))] if gemma else [-score for score in scores]


def find_merges(texts: Sequence[str], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens whose text is a token, those of the lowest rank first. Takes a look-up per character."""
    ids = {text: index for index, text in enumerate(texts)}
    order = sorted(range(len(texts)), key=lambda index: (ranks[index], index))
    found: list[tuple[str, str]] = []
    for index in order:
        text = texts[index]
        cuts = [cut for cut in range(1, len(text)) if text[:cut] in ids and text[cut:] in ids]
        pairs = [(text[:cut], text[cut:]) for cut in cuts]
        found += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]])) if len(pairs) > 1 else pairs
    return found


def _bpe(file: GgufFile, texts: Sequence[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = {text: index for index, text in enumerate(texts)}
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises nothing more special
        raise ModelError(f"{file.path}: the tokenizer's lists do not fit together: {error}") from error


def _add_tokens(
    tokenizer: Tokenizer, texts: Sequence[str], kinds: Sequence[int], *, takes_spaces: bool = False
) -> None:
    """Add the tokens that are found in texts before these are split: control tokens, and the author's own."""
    both = list(zip(texts, kinds, strict=True))
    control = [
        AddedToken(text, special=True, normalized=False, rstrip=takes_spaces and text not in NO_RSTRIP)
        for text, kind in both
        if kind in (Kind.CONTROL, Kind.UNKNOWN)
    ]
    tokenizer.add_special_tokens(control)
    own = [text for text, kind in both if kind == Kind.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, normalized=BLANK in text) for text in own])


def _begin_with_bos(tokenizer: Tokenizer, file: GgufFile, *, default: bool) -> None:
    """Put the first and the last token around a prompt, if the file asks for them; ``default``: without a key it asks
    for the first."""
    texts, _ = tokens_of(file)
    first, last = token_id(file, "bos_token_id"), token_id(file, "eos_token_id")
    first = first if file.metadata.get(f"{PREFIX}.add_bos_token", default) else None
    last = last if file.metadata.get(f"{PREFIX}.add_eos_token", False) else None
    ids = {each for each in (first, last) if each is not None}
    if ids:
        before, after = ([] if each is None else [texts[each]] for each in (first, last))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(texts[each], each) for each in ids]
        )


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    found = file.metadata.get(f"{PREFIX}.{key}", [])
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise ModelError(f"{file.path}: {PREFIX}.{key} is no list of {kind.__name__}")
    return found
