"""Reasoning in front of an output: whatever the model thinks, up to the mark that ends it."""

from __future__ import annotations

from pagebus.actors.model.grammars.literals import Literals, pattern, without
from pagebus.actors.model.reasoning import ReasoningFormat

BLANKS = "/\\s{0,8}/"
"""Between a mark and the output, and in front of the first mark."""


class UnboundedThoughts(ValueError):
    """The marks of this model's reasoning are no tokens, so that its length cannot be bounded."""


def before_answer(form: ReasoningFormat, literals: Literals, budget: int | None, *, begun: bool = False) -> str:
    """A grammar of reasoning, of at most ``budget`` tokens if that is not None, in front of the grammar ``@answer``.
    ``begun``: the prompt ends within it.

    Raises:
        UnboundedThoughts: there is a budget, and the mark that closes begins with no token.
    """
    opens = f"{BLANKS} {literals.any_of(form.opens)}"
    rules = _thought(form, literals, budget)
    if begun:
        return f"start: thought {BLANKS} @answer\n{rules}"
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
    opens, closes = _mark_tokens(form, literals)
    closed, unclosed = _thoughts(literals, closes, budget)
    reasoning = f"({closed} rest | {unclosed})" if unclosed else f"{closed} rest"
    if form.inside:
        return f"start: ({BLANKS} <[{opens}]>)? {reasoning}\nrest: (<[*]>)*\n"
    return f"start: (<[{opens}]> {reasoning} | <[^{opens}]> rest)?\nrest: (<[*]>)*\n"


def within_anything(form: ReasoningFormat, literals: Literals, budget: int, num_thought: int) -> str:
    """A grammar of whatever the model goes on with behind a prompt that ends with ``num_thought`` tokens of reasoning,
    or with none (-1). Wherever there is reasoning, it has at most ``budget`` tokens.

    Raises:
        UnboundedThoughts: the marks are more than a token each.
    """
    opens, closes = _mark_tokens(form, literals)
    closed, unclosed = _thoughts(literals, closes, budget)
    end = f" (<[{opens}]> {unclosed})?" if unclosed else ""
    rest = f"rest: (<[^{opens}]> | <[{opens}]> {closed})*{end}\n"
    if num_thought < 0:
        return f"start: rest\n{rest}"
    closed, unclosed = _thoughts(literals, closes, max(0, budget - num_thought))
    return f"start: {closed} rest{' | ' if unclosed else ''}{unclosed}\n{rest}"


def _mark_tokens(form: ReasoningFormat, literals: Literals) -> tuple[int, int]:
    opens, closes = (literals.token(marks[0]) if len(marks) == 1 else None for marks in (form.opens, form.closes))
    if opens is None or closes is None:
        raise UnboundedThoughts
    return opens, closes


def _thoughts(literals: Literals, closes: int, budget: int) -> tuple[str, str]:
    """At most ``budget`` tokens and the mark behind them; and what an output without an answer may end with in place of
    that: fewer tokens, because the mark must follow once the budget is used up. Empty: nothing."""
    token = f"<[^{','.join(map(str, [closes, *literals.ends]))}]>"
    closed = f"({token}){{0,{budget}}} <[{closes}]>" if budget else f"<[{closes}]>"
    return closed, "" if not budget else '""' if budget == 1 else f"({token}){{0,{budget - 1}}}"
