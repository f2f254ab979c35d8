"""Structural tags: free text in which certain tags have a content that is bound, in xgrammar's JSON form, as vLLM's
``response_format`` and ``structured_outputs`` take it. Written as one grammar in Lark.

Free text ends where what follows on it begins, so that has to be a fixed text (or the end of the output).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagebus.actors.model.grammars.literals import Literals, pattern, without
from pagebus.actors.model.grammars.schema_checks import check_regex, prepare_schema

ANY_TEXT, TRIGGERED = "any_text", "triggered_tags"
FREE = (ANY_TEXT, TRIGGERED)
MAX_DEPTH = 32
NAMES: Mapping[str, tuple[str, ...]] = {
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    ANY_TEXT: ("excludes", "max_tokens"),
    TRIGGERED: ("triggers", "tags", "excludes", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "const_string": ("value",),
    "json_schema": ("json_schema", "schema", "style", "any_order", "excludes", "max_whitespace_cnt"),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "token": ("token",),
    "exclude_token": ("exclude_tokens",),
    "any_tokens": ("exclude_tokens", "max_tokens"),
    "repeat": ("min", "max", "content"),
    **dict.fromkeys(("optional", "plus", "star"), ("content",)),
}
"""What each format may have besides its type."""
Format = Mapping[str, Any]


class BadTag(ValueError):
    """A structural tag that cannot be served; the text says where and why."""


class TagWriter:
    """Writes one structural tag. ``grammar`` reads a grammar in Lark or GBNF as one in Lark, ``layout`` says what may
    stand between the parts of JSON, in llguidance's words."""

    def __init__(self, literals: Literals, grammar: Callable[[str], str], layout: Mapping[str, Any]) -> None:
        self._literals = literals
        self._grammar = grammar
        self._layout = layout
        self._rules: list[str] = []
        self._side_grammars: list[dict[str, str]] = []

    def write(self, tag: object) -> list[dict[str, str]]:
        """The grammars of llguidance that ``tag`` comes to, the first of which is the one to begin with.

        Raises:
            BadTag: it has no such form, or cannot be served.
        """
        if not isinstance(tag, Mapping):
            raise BadTag("must be an object")
        expression = self._write(_root(tag), "format", ())
        lark = "\n".join([f"start: {expression}", *self._rules])
        return [{"lark_grammar": lark + "\n"}, *self._side_grammars]

    def _write(self, form: object, path: str, ends: Sequence[str], *, begun: bool = False) -> str:
        """An expression for ``form``, with the ``ends`` of which one follows on it. ``begun``: its fixed beginning has
        been read already."""
        if path.count(".") > 2 * MAX_DEPTH:
            raise BadTag(f"{path[:100]} is nested too deeply")
        if not isinstance(form, Mapping):
            raise BadTag(f"{path} must be an object")
        kind = form.get("type")
        if isinstance(kind, str) and kind in NAMES:
            _check_names(form, NAMES[kind], path)
        if kind == "sequence":
            return self._sequence(_list(form, "elements", path), path, ends, begun=begun)
        if kind == "tag":
            return self._tag(form, path, begun=begun) + self._then(ends)
        if kind == ANY_TEXT:
            return self._text(_strings(form, "excludes", path), ends, _count(form, "max_tokens", path))
        if kind == TRIGGERED:
            return self._triggered(form, path, ends)
        if kind == "const_string":
            return ("" if begun else self._literals.lark(_string(form, "value", path))) + self._then(ends)
        return f"{self._simple(kind, form, path)} {self._then(ends)}"

    def _then(self, ends: Sequence[str]) -> str:
        return f" {self._literals.any_of(tuple(ends))}" if ends else ""

    def _simple(self, kind: object, form: Format, path: str) -> str:
        """What is bound, wherever it stands."""
        if kind == "json_schema":
            return self._json(form, path)
        if kind == "regex":
            return self._regex(_string(form, "pattern", path))
        if kind == "grammar":
            return self._side(self._grammar(_string(form, "grammar", path)))
        if kind == "or":
            parts = _list(form, "elements", path)
            return self._choice([self._write(part, f"{path}.elements[{i}]", ()) for i, part in enumerate(parts)])
        if kind in ("optional", "plus", "star", "repeat"):
            return self._repeated(str(kind), form, path)
        if kind == "tags_with_separator":
            return self._separated(form, path)
        if kind in ("token", "exclude_token", "any_tokens"):
            return self._tokens(str(kind), form, path)
        raise BadTag(f"{path}.type: {str(kind)[:40]!r} is not supported")

    # -- parts --------------------------------------------------------------------------------------------------------

    def _sequence(self, parts: Sequence[Any], path: str, ends: Sequence[str], *, begun: bool) -> str:
        """Free text in it takes the fixed beginning of what follows along."""
        written = []
        for index, part in enumerate(parts):
            where, is_last = f"{path}.elements[{index}]", index + 1 == len(parts)
            if isinstance(part, Mapping) and part.get("type") in FREE and not is_last:
                begins = _beginning(parts[index + 1], f"{path}.elements[{index + 1}]")
                written.append(self._write(part, where, (begins,)))
                begun = True
            else:
                written.append(self._write(part, where, ends if is_last else (), begun=begun))
                begun = False
        return " ".join(written) if parts else self._then(ends)

    def _tag(self, form: Format, path: str, *, begun: bool = False, read: str = "") -> str:
        """``read``: what of its beginning has been read already."""
        _check_names(form, NAMES["tag"], path)
        begin = "" if begun else self._literals.lark(_string(form, "begin", path).removeprefix(read))
        end = form.get("end")
        ends = tuple(end) if isinstance(end, list) else (end,)
        if not ends or not all(isinstance(each, str) for each in ends):
            raise BadTag(f"{path}.end must be a string or an array of strings")
        given = () if ends == ("",) else ends
        return f"{begin} {self._write(form.get('content'), f'{path}.content', given)}"

    def _text(self, excluded: Sequence[str], ends: Sequence[str], max_tokens: int | None = None) -> str:
        """Any text up to one of ``ends``, which it takes along."""
        bound = "" if max_tokens is None else f"max_tokens={max_tokens}"
        if not ends:
            return self._rule(self._terminal(excluded), bound)
        if max_tokens is not None:
            return f"{self._rule(self._terminal((*excluded, *ends)), bound)} {self._literals.any_of(tuple(ends))}"
        first = [self._literals.split(end)[0] for end in ends if end]
        if len(first) < len(ends) or any(token is not None for _, token in first):
            marks = [text for text, token in first if token is not None]
            return f"{self._rule(self._terminal((*excluded, *marks)))} {self._literals.any_of(tuple(ends))}"
        suffix = "|".join(pattern(end) for end in ends)
        return self._rule(self._terminal(excluded), f"suffix=/{suffix}/")

    def _triggered(self, form: Format, path: str, ends: Sequence[str]) -> str:
        """``(text trigger rest-of-tag)* text``."""
        triggers, tags = _strings(form, "triggers", path), _list(form, "tags", path)
        excluded = _strings(form, "excludes", path)
        if not triggers or not tags or "" in triggers:
            raise BadTag(f"{path} needs triggers and tags")
        groups = [(trigger, self._tags_of(trigger, tags, path)) for trigger in triggers]
        if sum(len(group) for _, group in groups) != len(tags):
            raise BadTag(f"{path}.tags: each must begin with exactly one of the triggers")
        only = bool(form.get("at_least_one"))
        dispatched = self._choice(
            [
                f"{self._literals.lark(trigger) if only else self._text(excluded, (trigger,))} {self._choice(group)}"
                for trigger, group in groups
                if group
            ]
        )
        if form.get("stop_after_first"):
            return (dispatched if only else f"{dispatched}?") + self._then(ends)
        if only:  # the first stands at the beginning
            more = self._write({**form, "at_least_one": False}, path, ends)
            return f"{dispatched} {more}"
        return f"{dispatched}* {self._text((*excluded, *triggers), ends)}"

    def _tags_of(self, trigger: str, tags: Sequence[Any], path: str) -> list[str]:
        found = []
        for index, tag in enumerate(tags):
            where = f"{path}.tags[{index}]"
            if isinstance(tag, Mapping) and _string(tag, "begin", where).startswith(trigger):
                found.append(self._tag(tag, where, read=trigger))
        return found

    def _separated(self, form: Format, path: str) -> str:
        tags = self._choice([self._tag(tag, f"{path}.tags[{i}]") for i, tag in enumerate(_list(form, "tags", path))])
        separator = self._literals.lark(_string(form, "separator", path))
        some = tags if form.get("stop_after_first") else f"{tags} ({separator} {tags})*"
        return some if form.get("at_least_one") else f"({some})?"

    def _repeated(self, kind: str, form: Format, path: str) -> str:
        content = self._named(self._write(form.get("content"), f"{path}.content", ()))
        if kind != "repeat":
            return content + {"optional": "?", "plus": "+", "star": "*"}[kind]
        low, high = _count(form, "min", path), form.get("max")
        if low is None or type(high) is not int or (high != -1 and not max(low, 1) <= high):
            raise BadTag(f"{path} needs min and max, at least min and 1, or -1 for any number")
        return f"{content}{{{low},{'' if high == -1 else high}}}"

    def _tokens(self, kind: str, form: Format, path: str) -> str:
        if kind == "token":
            return f"<[{self._token(form.get('token'), path)}]>"
        excluded = {self._token(each, path) for each in _list(form, "exclude_tokens", path, needed=False)}
        one = f"<[^{','.join(map(str, sorted(excluded | set(self._literals.ends))))}]>"
        if kind == "exclude_token":
            return one
        bound = _count(form, "max_tokens", path)
        return f"({one})*" if bound is None else f"({one}){{0,{bound}}}" if bound else '""'

    def _token(self, token: object, path: str) -> int:
        number = self._literals.token(token) if isinstance(token, str) else token
        if type(number) is not int:
            raise BadTag(f"{path}: {str(token)[:40]!r} is no token of this model that is apart from text")
        return number

    # -- what is written ----------------------------------------------------------------------------------------------

    def _json(self, form: Format, path: str) -> str:
        schema = form.get("json_schema", form.get("schema"))
        for name, neutral in (("style", "json"), ("any_order", False), ("excludes", []), ("max_whitespace_cnt", None)):
            if form.get(name, neutral) != neutral:
                raise BadTag(f"{path}.{name}: only {neutral!r} is supported")
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise BadTag(f"{path}.json_schema must be an object")
        prepare_schema(schema)
        return self._named(f"%json {json.dumps({**schema, 'x-guidance': self._layout}, ensure_ascii=False)}")

    def _regex(self, regex: str) -> str:
        from llguidance import regex_to_lark

        check_regex(regex)
        return self._named(f"/{regex_to_lark(regex)}/")

    def _side(self, lark: str) -> str:
        name = f"side_{len(self._side_grammars)}"
        self._side_grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _choice(self, parts: Sequence[str]) -> str:
        if not parts:
            raise BadTag("has a choice of nothing")
        return self._named(" | ".join(part.strip() or '""' for part in parts))

    def _named(self, expression: str) -> str:
        """The expression as a named rule."""
        return self._rule(expression.strip() or '""')

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{f'[{attributes}]' if attributes else ''}: {expression}")
        return name

    def _terminal(self, excluded: Sequence[str]) -> str:
        """A terminal of any text without the ``excluded`` ones."""
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {without(sorted({text for text in excluded if text}))}")
        return name


def _root(tag: Format) -> Format:
    """The format of a tag; the older form has ``structures`` and ``triggers``."""
    _check_names(tag, ("format", "structures", "triggers"), "structural_tag")
    if "structures" not in tag:
        form = tag.get("format")
        if not isinstance(form, Mapping):
            raise BadTag("needs a format, or structures and triggers")
        return form
    structures = _list(tag, "structures", "structural_tag")
    for i, each in enumerate(structures):
        _check_names(each, ("begin", "schema", "end"), f"structures[{i}]")
    tags = [
        {
            "begin": _string(each, "begin", f"structures[{i}]"),
            "content": {"type": "json_schema", "json_schema": each.get("schema") or {}},
            "end": _string(each, "end", f"structures[{i}]"),
        }
        for i, each in enumerate(structures)
    ]
    return {"type": TRIGGERED, "triggers": tag.get("triggers"), "tags": tags}


def _check_names(form: object, names: Sequence[str], path: str) -> None:
    """Whether there is nothing else that would have an effect."""
    for name, value in form.items() if isinstance(form, Mapping) else ():
        if name not in ("type", *names) and value not in (None, []):
            raise BadTag(f"{path}.{str(name)[:100]} is not supported")


def _beginning(form: object, path: str) -> str:
    """The fixed text that ``form`` begins with."""
    if isinstance(form, Mapping) and form.get("type") == "const_string":
        return _string(form, "value", path)
    if isinstance(form, Mapping) and form.get("type") == "tag" and _string(form, "begin", path):
        return str(form["begin"])
    raise BadTag(f"{path}: behind free text there must be a fixed one")


def _string(form: object, name: str, path: str) -> str:
    value = form.get(name) if isinstance(form, Mapping) else None
    if not isinstance(value, str):
        raise BadTag(f"{path}.{name} must be a string")
    return value


def _list(form: Format, name: str, path: str, *, needed: bool = True) -> list[Any]:
    value = form.get(name)
    if value is None and not needed:
        return []
    if not isinstance(value, list):
        raise BadTag(f"{path}.{name} must be an array")
    return value


def _strings(form: Format, name: str, path: str) -> list[str]:
    value = _list(form, name, path, needed=False)
    if not all(isinstance(each, str) for each in value):
        raise BadTag(f"{path}.{name} must be an array of strings")
    return value


def _count(form: Format, name: str, path: str) -> int | None:
    value = form.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise BadTag(f"{path}.{name} must be a whole number")
    return value
