"""Reads a JSON object with exact types: a bool is no integer, 2.0 is one and 2.5 is not, null means "not given".

Reading a field removes it from :class:`Fields`, so that unknown fields are left at the end. A :data:`LISTENER` receives
each field that is read, as JSON Schema. The code that validates bodies thereby also writes ``/openapi.json``
(:mod:`pagebus.web.routes.body_schema`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from itertools import chain
from typing import Any, Protocol, TypeVar

from pagebus.web.http.errors import MAX_SHOWN, bad_field, not_supported, unknown_field
from pagebus.web.http.limits import MAX_NAME_CHARS
from pagebus.web.http.naming import FieldNames, naming, renamed

D = TypeVar("D")
T = TypeVar("T")
Schema = Mapping[str, Any]
"""JSON Schema of a value, as far as it says anything: ``{}`` is any value."""


class Listener(Protocol):
    """Is told the path of a field and what is read there. ``translated``: of a body that was made of the client's."""

    def __call__(self, name: str, schema: Schema, *, translated: bool = False) -> None: ...


LISTENER: ContextVar[Listener | None] = ContextVar("LISTENER", default=None)
"""Nobody, while requests are served."""
ANY: Schema = {}
ONLY_NULL: Schema = {"type": "null"}
"""Schema of unknown fields: null is the same as leaving one out."""
Harmless = tuple[Callable[[Any], bool], str]
"""Of a field without effect: whether a value may be given, and what is wrong with one that may not."""
NEAR = 0.7
"""How alike the names of two fields are (:mod:`difflib`) of which one may be meant by the other."""
EXACT = 2.0**53
"""From here on a float does not tell which integer it was."""
UNBOUNDED = 2**31 - 1
"""An upper bound this large is a limit of the wire format; messages mention it only when it is exceeded."""

TYPE_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array",
              dict: "an object", type(None): "null"}  # fmt: skip


def unheard(parse: Callable[..., T], *args: Any) -> T:
    """What ``parse`` reads of an object that lies within the one that is being described."""
    token = LISTENER.set(None)
    try:
        return parse(*args)
    finally:
        LISTENER.reset(token)


@contextmanager
def translated(names: FieldNames) -> Iterator[None]:
    """What is read in here is of a body that was made of the client's, where its fields have the names that ``names``
    gives: errors and the listener are told those."""
    listener = LISTENER.get()

    def listen(name: str, schema: Schema, *, translated: bool = False) -> None:
        if listener is not None:
            listener(renamed(name, names), schema, translated=True)

    token = LISTENER.set(listener and listen)
    try:
        with naming(names):
            yield
    finally:
        LISTENER.reset(token)


def type_name(value: object) -> str:
    """``an integer``."""
    return TYPE_NAMES.get(type(value), type(value).__name__)


def is_deeper(value: object, most: int) -> bool:
    """Whether objects and arrays of a JSON value are nested more than ``most`` deep. It may be too deep to recurse."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        if not level:
            return False
        children = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in children if isinstance(each, dict | list)]
    return bool(level)


class Fields:
    """The fields of one object; ``path`` is put before their names in errors."""

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self._data = dict(data)
        self._path = path
        self._listener = LISTENER.get()
        self._known: list[str] = []
        """Names that were asked for, one of which an unknown field may mean."""

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str, schema: Schema = ANY) -> Any:
        """The value as it is, None if it was not given. ``schema`` is what the caller will hold it to."""
        if self._listener:
            self._listener(self.path(name), schema)
        self._known.append(name)
        return self._data.pop(name, None)

    def peek(self, name: str) -> Any:
        """The value as it is, to be taken later; None if it was not given."""
        return self._data.get(name)

    def _typed(self, name: str, default: D, expected: type | tuple[type, ...], what: str) -> Any:
        self._known.append(name)
        value = self._data.pop(name, None)
        if value is None:
            return default
        allowed = expected if isinstance(expected, tuple) else (expected,)
        if type(value) is float and expected is int and value.is_integer():
            if abs(value) >= EXACT:  # JSON knows no such integers here: they came as numbers
                problem = f"must be an integer of 64 bits, got {shown(value)}"
                raise bad_field(self.path(name), problem, code="invalid_type")
            return int(value)
        if type(value) not in allowed:
            raise bad_field(self.path(name), f"must be {what}, got {type_name(value)}", code="invalid_type")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        if self._listener:
            self._listener(self.path(name), {"type": "boolean", "default": default})
        return bool(self._typed(name, default, bool, "a boolean"))

    def integer(self, name: str, default: D, low: int, high: int) -> int | D:
        """``low`` and ``high`` are inclusive."""
        if self._listener:
            schema = {"type": "integer", "minimum": low, "maximum": high, "default": default}
            self._listener(self.path(name), schema)
        value = self._typed(name, default, int, "an integer")
        if type(value) is int and not low <= value <= high:
            limit = f"at most {high}" if value > high >= UNBOUNDED else bounds(low, high)
            raise bad_field(self.path(name), f"must be {limit}, got {shown(value)}")
        return value  # type: ignore[no-any-return]

    def number(self, name: str, default: D, low: float, high: float, *, above_low: bool = False) -> float | D:
        """``low`` and ``high`` are inclusive, ``low`` only unless ``above_low``."""
        if self._listener:
            least = "exclusiveMinimum" if above_low else "minimum"
            self._listener(self.path(name), {"type": "number", least: low, "maximum": high, "default": default})
        value = self._typed(name, default, (int, float), "a number")
        if value is None:
            return default
        if not (low < value <= high if above_low else low <= value <= high):
            limit = f"more than {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
            raise bad_field(self.path(name), f"must be {limit}, got {shown(value)}")
        return float(value)

    def string(
        self,
        name: str,
        default: D,
        *,
        max_chars: int = MAX_NAME_CHARS,
        empty: bool = True,
        choices: Sequence[str] | None = None,
    ) -> str | D:
        """``choices`` are those that the caller will take; it says itself what is wrong with others."""
        if self._listener:
            schema: Schema = {"type": "string", "minLength": 0 if empty else 1, "maxLength": max_chars}
            self._listener(self.path(name), {"enum": list(choices)} if choices else {**schema, "default": default})
        value = self._typed(name, default, str, "a string")
        if isinstance(value, str):
            if not empty and not value:
                raise bad_field(self.path(name), "must not be empty")
            if len(value) > max_chars:
                raise bad_field(self.path(name), f"must have at most {max_chars} characters, got {len(value)}")
        return value  # type: ignore[no-any-return]

    def array(self, name: str, *, max_items: int, min_items: int = 0, items: Schema = ANY) -> list[Any] | None:
        """``min_items`` and ``items`` are what the caller will hold it to."""
        if self._listener:
            schema = {"type": "array", "minItems": min_items, "maxItems": max_items, "items": items}
            self._listener(self.path(name), schema)
        value = self._typed(name, None, list, "an array")
        if value is not None and len(value) > max_items:
            raise bad_field(self.path(name), f"must have at most {max_items} items, got {len(value)}")
        return value  # type: ignore[no-any-return]

    def object(self, name: str, schema: Schema = ANY) -> dict[str, Any] | None:
        """``schema`` is what the caller will hold its entries to."""
        if self._listener:
            self._listener(self.path(name), {"type": "object", **schema})
        value: dict[str, Any] | None = self._typed(name, None, dict, "an object")
        return value

    def finish(
        self,
        unsupported: Mapping[str, tuple[Any, ...]],
        harmless: Mapping[str, Harmless] | None = None,
        *,
        allow_unknown: bool | None = None,
        names: FieldNames = (),
    ) -> None:
        """Refuse what is left, unless it is null, a neutral value of an unsupported field, or a harmless field.
        ``allow_unknown`` is None where the setting has no say. ``names``: what fields of other APIs are called here."""
        if self._listener:
            self._listener(self._path, {"type": "object", "additionalProperties": ONLY_NULL})
            for name, neutral in unsupported.items():
                self._listener(self.path(name), {"enum": list(neutral)})
            for name in harmless or ():
                self._listener(self.path(name), ANY)
        harmless = harmless or {}
        for name, value in self._data.items():
            if value is None:
                continue
            if name in harmless:
                takes, problem = harmless[name]
                if not takes(value):
                    raise bad_field(self.path(name), problem)
            elif name in unsupported:
                if not any(same(value, neutral) for neutral in unsupported[name]):
                    raise not_supported(self.path(name), unsupported[name])
            elif not allow_unknown:
                path = self.path(name if len(name) <= 100 else name[:100] + "...")
                near = self._near(name[:MAX_SHOWN], [*self._known, *harmless], names)
                raise unknown_field(path, near, may_allow=allow_unknown is not None)

    @staticmethod
    def _near(name: str, known: Sequence[str], names: FieldNames) -> str | None:
        """The field that may be meant by an unknown one."""
        if (here := renamed(name, names)) != name:
            return here
        return next(iter(get_close_matches(name, known, 1, NEAR)), None)


def same(value: object, neutral: object) -> bool:
    """Equal and of the same type: 1 is not True."""
    return type(value) is type(neutral) and value == neutral


def bounds(low: int, high: int) -> str:
    return f"at least {low}" if high >= UNBOUNDED else f"from {low} to {high}"


def shown(value: float) -> str:
    """A number for an error message; huge ones are cut."""
    text = repr(value)
    return text if len(text) <= 30 else text[:30] + "..."
