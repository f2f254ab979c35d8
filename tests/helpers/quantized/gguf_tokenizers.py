"""What GGUF files say of a tokenizer, as converters write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_pairs(tokenizer: Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """Keys of a byte-level tokenizer; ``more`` are others, without ``tokenizer.ggml.`` in front."""
    said = json.loads(tokenizer.to_str())
    tokens, kinds = _tokens(said)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in said["model"]["merges"]]
    return _keys(model="gpt2", pre=pre, tokens=tokens, token_type=kinds, merges=merges, **more)


def pieces(tokenizer: Tokenizer, scores: dict[str, float], **more: Any) -> dict[str, Any]:
    """Keys of SentencePiece's. Blanks of the author's own tokens are spaces in files."""
    said = json.loads(tokenizer.to_str())
    tokens, kinds = _tokens(said)
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x"):
            kinds[index] = BYTE
        elif token == said["model"]["unk_token"]:
            kinds[index] = UNKNOWN
    numbers = [float(scores.get(token, 0.0)) for token in tokens]
    texts = [token.replace("▁", " ") if kind == OWN else token for token, kind in zip(tokens, kinds, strict=True)]
    unknown = tokenizer.token_to_id(said["model"]["unk_token"])
    return _keys(
        model="llama", tokens=texts, token_type=kinds, scores=numbers, unknown_token_id=unknown, **more
    )  # fmt: skip


def of_folder(folder: Path, pre: str) -> dict[str, Any]:
    """Keys for a model's folder with a byte-level tokenizer, and its chat template."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    said = json.loads((folder / "tokenizer_config.json").read_text())
    bos, eos = (tokenizer.token_to_id(said[key]) for key in ("bos_token", "eos_token"))
    keys = byte_pairs(tokenizer, pre, bos_token_id=bos, eos_token_id=eos, add_bos_token=False)
    return {**keys, "tokenizer.chat_template": said["chat_template"]}


def _keys(**said: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}


def _tokens(said: dict[str, Any]) -> tuple[list[str], list[int]]:
    vocabulary = said["model"]["vocab"]
    added = {each["content"]: each for each in said["added_tokens"]}
    size = 1 + max([*vocabulary.values(), *(each["id"] for each in added.values())])
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in vocabulary.items():
        tokens[index], kinds[index] = token, NORMAL
    for token, each in added.items():
        tokens[each["id"]], kinds[each["id"]] = token, CONTROL if each["special"] else OWN
    return tokens, kinds
