"""The files with which sentence-transformers describes a model: ``modules.json``, and a folder for each module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.pooling.pooler import Between, Pooling, Product

MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
BY_NAME: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
ACTIVATIONS: dict[str, Between] = {"Tanh": "tanh", "Identity": "none"}
POOLING_NOTHING = ("Transformer", "LogitScore")
"""Modules of models that generate, too. A logit score compares two tokens, as ``--classifier-from-token`` does."""


@dataclass(frozen=True, slots=True)
class Modules:
    """What follows the transformer: pooling, products, and whether vectors are scaled to length 1."""

    pooling: Pooling
    products: tuple[Product, ...]
    normalize: bool
    most_tokens: int | None


def read_modules(folder: Path) -> Modules | None:
    """None where there is no ``modules.json``, or nothing in it pools.

    Raises:
        ModelError: a module is unknown, or broken; the text names it.
    """
    if not (folder / "modules.json").is_file():
        return None
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelError(f"{folder / 'modules.json'} holds no list of modules")
    pooling: Pooling | None = None
    products: list[Product] = []
    normalize = False
    for module in modules:
        kind, path = str(module.get("type", "")).rsplit(".", 1)[-1], _inside(str(module.get("path") or ""))
        if kind == "Pooling":
            pooling = _pooling(_object(folder / path / "config.json"))
        elif kind == "Dense":
            products.append(_product(_object(folder / path / "config.json"), path))
        elif kind == "Normalize":
            normalize = True
        elif kind not in POOLING_NOTHING:
            raise ModelError(f"modules.json: module {kind!r} is not supported (only pooling, dense and normalize)")
        if normalize and kind == "Dense":
            raise ModelError("modules.json: a dense module behind normalize is not supported")
    if pooling is None:
        return None
    return Modules(pooling, tuple(products), normalize, _most_tokens(folder))


def _pooling(config: Mapping[str, Any]) -> Pooling:
    """The one mode that is on: by flags, or by its name."""
    named = config.get("pooling_mode")
    if named is not None:
        if not isinstance(named, str) or named not in BY_NAME:
            raise ModelError(f"pooling_mode {named!r} is not supported (only {', '.join(BY_NAME)})")
        return BY_NAME[named]
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(modes) != 1 or modes[0] not in MODES:
        raise ModelError(f"pooling by {' and '.join(modes) or 'nothing'} is not supported (only {', '.join(MODES)})")
    return MODES[modes[0]]


def _product(config: Mapping[str, Any], path: str) -> Product:
    act = str(config.get("activation_function") or "Tanh").rsplit(".", 1)[-1]
    width = config.get("out_features")
    if act not in ACTIVATIONS:
        raise ModelError(f"{path}: activation {act!r} is not supported (only {', '.join(ACTIVATIONS)})")
    if type(width) is not int or width < 1:
        raise ModelError(f"{path}: out_features is {width!r}, not a whole number of at least 1")
    return Product(f"{path}.linear", width, bool(config.get("bias", True)), ACTIVATIONS[act], path)


def _most_tokens(folder: Path) -> int | None:
    file = folder / "sentence_bert_config.json"
    value = _object(file).get("max_seq_length") if file.is_file() else None
    return value if type(value) is int and value >= 1 else None


def _inside(path: str) -> str:
    """A folder's name. Raises ModelError if it is not inside the model's own."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise ModelError(f"modules.json: path {path!r} lies outside the model's folder")
    return path


def _object(path: Path) -> Mapping[str, Any]:
    value = _read(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
