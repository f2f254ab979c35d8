"""The tokens of a GGUF file: their texts, their kinds, and those that end an answer."""

from __future__ import annotations

from enum import IntEnum

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.gguf.header import GgufFile

PREFIX = "tokenizer.ggml"
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
    "<|return|>", "<|call|>", "<end_of_utterance>", "<EOT>", "_<EOT>",
})  # fmt: skip
"""Control tokens that end an answer, even if the file does not say so: older files name only one."""


class Kind(IntEnum):
    """The kind of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokens_of(file: GgufFile) -> tuple[list[str], list[int]]:
    """Texts and kinds of all tokens; empty if the file has no tokenizer. Raises ModelError."""
    texts, kinds = file.metadata.get(f"{PREFIX}.tokens", []), file.metadata.get(f"{PREFIX}.token_type")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ModelError(f"{file.path}: {PREFIX}.tokens is no list of texts")
    if kinds is None:
        return texts, [Kind.NORMAL] * len(texts)
    if not isinstance(kinds, list) or len(kinds) != len(texts):
        raise ModelError(f"{file.path}: {PREFIX}.token_type is no list of {len(texts)} kinds")
    return texts, kinds


def token_id(file: GgufFile, key: str) -> int | None:
    """The token with this role, such as ``bos_token_id``; None if the file names none. Raises ModelError."""
    found = file.metadata.get(f"{PREFIX}.{key}")
    count = len(tokens_of(file)[0])
    if found is not None and (type(found) is not int or not 0 <= found < max(count, 1)):
        raise ModelError(f"{file.path}: {PREFIX}.{key} is {found!r}, no token")
    return found


def end_token_ids(file: GgufFile, vocab_size: int) -> list[int]:
    """Tokens below ``vocab_size`` that end an answer, without repetition. Raises ModelError."""
    texts, kinds = tokens_of(file)
    said = [token_id(file, key) for key in END_KEYS]
    by_text = (index for index, kind in enumerate(kinds) if kind == Kind.CONTROL and texts[index] in END_TEXTS)
    found = dict.fromkeys([*(each for each in said if each is not None), *by_text])
    return [index for index in found if index < vocab_size]
