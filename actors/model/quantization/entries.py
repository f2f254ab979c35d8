"""Reading a ``quantization_config`` field by field: each getter checks, and names the field that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.quantization.scheme import Match, Rule


class Entries:
    """The object, and where it stands. All getters raise ModelError."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def replace(self, key: str, value: object) -> None:
        """Read this field as ``value`` from now on."""
        self.raw = {**self.raw, key: value}

    def get(self, key: str, default: Any = None) -> Any:
        """The field as it is; null counts as left out."""
        value = self.raw.get(key)
        return default if value is None else value

    def wrong(self, key: str, why: str) -> ModelError:
        """The error for a field."""
        return ModelError(f"{self.where}: {key} {self.raw.get(key)!r} {why}")

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """The field, if it is one of these."""
        value = self.get(key, default)
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise ModelError(f"{self.where}: {key} {value!r} is not supported (only {', '.join(map(str, allowed))})")
        return value

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The whole number in the first of ``keys`` that is there."""
        for key in keys:
            if key in self:
                value = self.raw[key]
                if type(value) is not int or not -1 <= value < 2**31:
                    raise self.wrong(key, "is no whole number")
                return value
        if default is None:
            raise ModelError(f"{self.where} has no {keys[0]}")
        return default

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "is neither true nor false")
        return value

    def words(self, *keys: str) -> tuple[str, ...]:
        """A list of texts, of the first of ``keys`` that is there; empty if none is."""
        for key in keys:
            if key in self:
                value = self.raw[key]
                if not isinstance(value, list) or any(not isinstance(each, str) or not each for each in value):
                    raise self.wrong(key, "is no list of names")
                return tuple(value)
        return ()

    def inner(self, key: str) -> Entries:
        """An object in a field; empty if it is not there."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "is no object")
        return Entries(value, f"{self.where}: {key}")

    def ignored(self, match: Match, *keys: str) -> tuple[Rule, ...]:
        """Rules for modules that stay as they are."""
        return tuple(Rule(match, entry, None) for entry in self.words(*keys))
