"""Reasoning in front of an output: whatever the model thinks, up to the mark that ends it."""

from __future__ import annotations

from actors.grammars.literals import Literals, pattern, without
from actors.reasoning import ReasoningFormat

BLANKS = "/\\s{0,8}/"
"""Between a mark and the output, and in front of the first mark."""


class UnboundedThoughts(ValueError):
    """The marks of this model's reasoning are no tokens, so that its length cannot be bounded."""


def before_answer(form: ReasoningFormat, literals: Literals, budget: int | None) -> str:
    """A grammar of reasoning, of at most ``budget`` tokens if that is not None, in front of the grammar ``@answer``.

    Raises:
        UnboundedThoughts: there is a budget, and the mark that closes begins with no token.
    """
    opens = f"{BLANKS} {literals.any_of(form.opens)}"
    rules = _thought(form, literals, budget)
    reasoning = "thought" if form.inside else f"{opens} thought"
    optional = f"({opens})? " if form.inside else ""
    if form.inside:
        start = f"{optional}{reasoning} {BLANKS} @answer"
    elif form.instead:
        start = f"({reasoning} | {literals.any_of(form.instead)}) {BLANKS} @answer"
    else:
        start = f"({reasoning} {BLANKS})? @answer"
    return f"start: {start}\n{rules}"


def _thought(form: ReasoningFormat, literals: Literals, budget: int | None) -> str:
    """The rule ``thought``: up to the closing mark, which it includes."""
    first = {parts[0] for parts in map(literals.split, form.closes)}
    closes = literals.any_of(form.closes)
    if any(token is None for _, token in first):
        if budget is not None:
            raise UnboundedThoughts
        # The first that looks like the mark is the mark.
        return f"thought[suffix=/{'|'.join(map(pattern, form.closes))}/]: /(?s:.*)/\n"
    if budget == 0:
        return f"thought: {closes}\n"
    # Its text could be written in place of the token, and would be read as the mark: so it must not be.
    bound = "" if budget is None else f"[max_tokens={budget}]"
    text = without(sorted(mark for mark, _ in first))
    return f"thought: inner {closes}\ninner{bound}: INNER\nINNER: {text}\n"


def before_anything(form: ReasoningFormat, literals: Literals, budget: int) -> str:
    """A grammar of reasoning of at most ``budget`` tokens in front of whatever the model goes on with.

    Raises:
        UnboundedThoughts: the marks are more than a token each.
    """
    opens, closes = (literals.token(marks[0]) if len(marks) == 1 else None for marks in (form.opens, form.closes))
    if opens is None or closes is None:
        raise UnboundedThoughts
    inner = ",".join(map(str, [closes, *literals.ends]))
    thought = f"(<[^{inner}]>){{0,{budget}}}" if budget else '""'
    # It may end without the mark: then nothing of it is an answer.
    reasoning = f"{thought} (<[{closes}]> rest)?"
    if form.inside:
        return f"start: ({BLANKS} <[{opens}]>)? {reasoning}\nrest: (<[*]>)*\n"
    return f"start: (<[{opens}]> {reasoning} | <[^{opens}]> rest)?\nrest: (<[*]>)*\n"
