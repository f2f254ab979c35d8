"""Pre-tokenizers: how texts are split before byte pairs are merged, by their names in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
LARGE, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class Split:
    """``pattern``: matches are parts of their own; none: as GPT-2 cuts, ``digits`` one by one before that. ``whole``:
    a part that is a token is not merged from smaller ones; ``composed``: letters and marks become one character;
    ``bos``: prompts begin with that token unless the file says otherwise."""

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    composed: bool = False
    bos: bool = False


_LLAMA3_PATTERN = "|".join((ENDINGS, LETTERS, r"\p{N}{1,3}", SIGNS, SPACES))
_QWEN2_PATTERN = "|".join((ENDINGS, LETTERS, r"\p{N}", SIGNS, SPACES))
_CASED = (f"{BEFORE}{LARGE}*{SMALL}+", f"{BEFORE}{LARGE}+{SMALL}*")
_TEKKEN_PATTERN = "|".join((*_CASED, r"\p{N}", SIGNS_AND_SLASHES, SPACES))
_GPT4O_PATTERN = "|".join((*(f"{each}{ENDINGS}?" for each in _CASED), r"\p{N}{1,3}", SIGNS_AND_SLASHES, SPACES))

LLAMA3 = Split(_LLAMA3_PATTERN, whole=True, bos=True)
QWEN2 = Split(_QWEN2_PATTERN, composed=True)
SPLITS: Mapping[str, Split] = {
    "llama3": LLAMA3, "llama-v3": LLAMA3, "llama-bpe": LLAMA3, "falcon3": LLAMA3,
    "dbrx": Split(_LLAMA3_PATTERN), "smaug-bpe": Split(_LLAMA3_PATTERN),
    "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2,
    "tekken": Split(_TEKKEN_PATTERN, whole=True, bos=True),
    "gpt-4o": Split(_GPT4O_PATTERN),
    "gpt-2": Split(), "smollm": Split(digits=True), "starcoder": Split(digits=True), "refact": Split(digits=True),
}  # fmt: skip
"""By ``tokenizer.ggml.pre``."""
