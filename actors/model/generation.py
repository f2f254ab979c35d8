"""How a model generates, by the files of its folder: what ends an answer, and how tokens are sampled by default."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def end_token_ids(
    generation: Mapping[str, Any], raw: Mapping[str, Any], vocab_size: int, others: Iterable[int]
) -> tuple[int, ...]:
    """One id or a list, from the generation file, else the config; and the ``others``. Ids that cannot occur are left
    out."""
    said = generation.get("eos_token_id")
    said = raw.get("eos_token_id") if said is None else said
    ids = said if isinstance(said, list) else [said]
    return tuple(dict.fromkeys(i for i in (*ids, *others) if type(i) is int and 0 <= i < vocab_size))


def tokenizer_end(folder: Path) -> tuple[int, ...]:
    """The ``eos_token`` of the folder's tokenizer. It ends answers too, as in vLLM: models that were trained further
    may have another there than in their configuration. Empty if there is none, or the files are broken, which whoever
    loads the tokenizer says."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
        token = config.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        added = [(int(key), each["content"]) for key, each in (config.get("added_tokens_decoder") or {}).items()]
        found = [number for number, content in added or _added_tokens(folder) if content == text]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
    return tuple(found[:1])


def _added_tokens(folder: Path) -> list[tuple[int, str]]:
    """Those of tokenizer.json. The vocabulary behind them, which may have 30 MB, is not parsed."""
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    tokens, _ = json.JSONDecoder().raw_decode(text, text.index("[", text.index('"added_tokens"')))
    return [(each["id"], each["content"]) for each in tokens]


def default_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """Sampling defaults under the request's names; ``max_new_tokens`` is called ``max_tokens`` there."""
    names = {name: name for name in SAMPLING_FIELDS} | {"max_new_tokens": "max_tokens"}
    found = {ours: generation.get(theirs) for theirs, ours in names.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and type(value) is not bool}
