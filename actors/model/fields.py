"""Reading ``config.json`` field by field: each getter checks, and names the field that is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pagebus.actors.model.errors import ModelError

LAYER_KINDS = ("full_attention", "sliding_attention")


class Fields:
    """The object of a ``config.json``, a text model's own fields on top. All getters raise ModelError."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def __contains__(self, key: str) -> bool:
        return key in self.raw

    def get(self, key: str, default: Any = None) -> Any:
        """The field as it is; null counts as given."""
        return self.raw.get(key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number >= 1; required if there is no default."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"config.json has no {key}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise ModelError(f"config.json: {key} is {value!r}, not a whole number of at least 1")
        return value

    def count(self, key: str, default: int) -> int:
        """A whole number >= 0."""
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise ModelError(f"config.json: {key} is {value!r}, not a whole number of at least 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number > 0; required if there is no default."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"config.json has no {key}")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"config.json: {key} is {value!r}, not a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; what is not there is false."""
        return bool(self.raw.get(key, False))

    def word(self, key: str, default: str, allowed: Mapping[str, Any]) -> Any:
        """What ``allowed`` has for the word in the field."""
        value = self.raw.get(key) or default
        if value not in allowed:
            known = ", ".join(sorted(allowed))
            raise ModelError(f"config.json: {key} {value!r} is not supported (only {known})")
        return allowed[value]

    def refuse(self, key: str, why: str) -> None:
        """Fail if the field says anything: ``why`` is what would be needed."""
        if self.raw.get(key):
            raise ModelError(f"config.json: {key} is not supported ({why})")

    def kv_heads(self, *, optional: bool = False) -> int:
        """Key and value heads. Null means as many as query heads, and so does an ``optional`` field left out."""
        heads = self.integer("num_attention_heads")
        if self.raw.get("num_key_value_heads") is None and (optional or "num_key_value_heads" in self.raw):
            return heads
        kv_heads = self.integer("num_key_value_heads")
        if heads % kv_heads:
            raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
        return kv_heads

    def head_dim(self, default: int | None = None) -> int:
        """Width of a head: given, else ``default`` if it is left out, else hidden_size / heads."""
        if self.raw.get("head_dim") is not None:
            head_dim = self.integer("head_dim")
        elif default is not None and "head_dim" not in self.raw:
            head_dim = default
        else:
            hidden_size, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
            head_dim, rest = divmod(hidden_size, heads)
            if rest:
                raise ModelError(f"config.json: hidden_size {hidden_size} is not a multiple of {heads} heads")
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim {head_dim} is odd, rotary embeddings need pairs")
        return head_dim

    def layer_types(self, default: tuple[str, ...], kinds: tuple[str, ...] = LAYER_KINDS) -> tuple[str, ...]:
        """One of these ``kinds`` for each layer."""
        types = self.raw.get("layer_types")
        if types is None:
            return default
        count = self.integer("num_hidden_layers")
        if not isinstance(types, list) or len(types) != count:
            raise ModelError(f"config.json: layer_types must list {count} layers")
        unknown = sorted({str(kind) for kind in types} - set(kinds))
        if unknown:
            raise ModelError(f"config.json: layer type {unknown[0]!r} is not supported")
        return tuple(types)

    def layer_flags(self, key: str) -> tuple[bool, ...] | None:
        """One flag for each layer; None if the field is not there."""
        flags = self.raw.get(key)
        if flags is None:
            return None
        count = self.integer("num_hidden_layers")
        if not isinstance(flags, list) or len(flags) != count:
            raise ModelError(f"config.json: {key} must list {count} layers")
        return tuple(map(bool, flags))


def every_nth(count: int, step: int) -> tuple[str, ...]:
    """Sliding layers, and each ``step``-th of ``count`` full."""
    return tuple("sliding_attention" if (index + 1) % step else "full_attention" for index in range(count))
