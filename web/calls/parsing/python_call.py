"""Parser of one tool call in Python's syntax, ``name(key="value", other=[1, 2])``; emits its arguments as JSON.

Whether the arguments are literals is known only at the end, so the call is emitted whole. Text that turns out not to be
a call has then not been emitted as one.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection
from typing import Any

NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")
KEY = re.compile(r"[A-Za-z_]\w*")
CONSTANTS = {"true": True, "false": False, "null": None}
"""Constants with different names in Python and JSON."""
_PAIRS = {"(": ")", "[": "]", "{": "}"}


class PythonCall:
    """Fed from its name on, one of ``names``. ``name`` is None until the end. ``done``: the
    closing bracket has been read. ``broken``: it is no call, or has an argument that is no literal. Arguments without a
    name are left out, as vLLM does."""

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self._names = names
        self._function = ""
        self._raw: list[str] = []
        self.done = False
        self.broken = False
        self._new: list[str] = []
        self._num_keys = 0
        self._key = ""
        self._pieces: list[str] = []
        self._closers: list[str] = []
        """The brackets that are open within a value."""
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> str:
        """Read on; returns what is behind the call."""
        for place, char in enumerate(text):
            if self.done or self.broken:
                self._raw.append(text[:place])
                return text[place:]
            if not self._function:
                self._read_name(char)
            elif self._quote or not self._ends_something(char):
                self._pieces.append(char)
                self._track(char)
        self._raw.append(text)
        return ""

    @property
    def raw(self) -> str:
        """Everything that was read."""
        return "".join(self._raw)

    def _piece(self) -> str:
        piece = "".join(self._pieces)
        self._pieces.clear()
        return piece

    def take_arguments(self) -> str:
        """What is new of the arguments, as JSON."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def _read_name(self, char: str) -> None:
        name = self._piece()
        if char == "(" and name in self._names:
            self._function = name
            return
        self._pieces.append(name + char)
        self.broken = NAME.fullmatch(name + char) is None

    def _ends_something(self, char: str) -> bool:
        """A key ends with ``=``, a value with a comma or the closing bracket, where no bracket is open."""
        if self._closers:
            return False
        if char == "=" and not self._key and KEY.fullmatch(key := "".join(self._pieces).strip()):
            self._key = key
            self._pieces.clear()
            return True
        if char not in ",)":
            return False
        value = self._piece()
        if self._key:
            self._end_value(value)
        if char == ")" and not self.broken:
            self._new.append("}" if self._num_keys else "{}")
            self.name, self.done = self._function, True
        return True

    def _track(self, char: str) -> None:
        """Which brackets and quotes the next character is in."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "'\"":
            self._quote = char
        elif char in _PAIRS:
            self._closers.append(_PAIRS[char])
        elif char in ")]}":
            self.broken = not self._closers or self._closers.pop() != char

    def _end_value(self, text: str) -> None:
        try:
            value = literal(text)
        except ValueError:
            self.broken = True
            return
        opener = ", " if self._num_keys else "{"
        self._new.append(f"{opener}{json.dumps(self._key, ensure_ascii=False)}: {value}")
        self._num_keys, self._key = self._num_keys + 1, ""


def literal(text: str) -> str:
    """A literal of Python, or of JSON, as JSON.

    Raises:
        ValueError: it is none, or one that JSON cannot say.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know, and reads as they are: \d
            node = ast.parse(text.strip(), mode="eval").body
        return json.dumps(_value(node), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_value(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand)
        if type(number) in (int, float):
            return -number if isinstance(node.op, ast.USub) else number
    raise ValueError("is no literal")
