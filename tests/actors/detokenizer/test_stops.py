"""Stop strings, against a naive search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebus.actors.detokenizer.stops import StopMatch, StopMatcher

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)
DELTAS = st.lists(st.text("ab\n", max_size=4), max_size=12)


def naive(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Text given out and the stop string: the match that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def streamed(deltas: list[str], stops: tuple[str, ...], include: bool) -> tuple[list[str], str | None]:
    """What is given out after each delta, and the stop string."""
    matcher = StopMatcher(stops, include=include)
    given = []
    for delta in deltas:
        result = matcher.push(delta)
        if isinstance(result, StopMatch):
            return [*given, result.text], result.stop
        given.append(result)
    return [*given, matcher.finish()], None


@given(deltas=DELTAS, stops=STOPS, include=st.booleans())
def test_equals_a_search_of_the_whole_text(deltas: list[str], stops: tuple[str, ...], include: bool) -> None:
    """However the text is cut into deltas, text and stop string are those of the naive search."""
    given_out, stop = streamed(deltas, stops, include)

    assert naive("".join(deltas), stops, include) == ("".join(given_out), stop)


@given(text=st.text("abc\n", max_size=10), stops=STOPS, include=st.booleans())
def test_every_chunking_gives_the_same(text: str, stops: tuple[str, ...], include: bool) -> None:
    """All ways to cut one text in two, three and single characters agree."""
    expected = naive(text, stops, include)
    cuts = [[text[:i], text[i:j], text[j:]] for j in range(len(text) + 1) for i in range(j + 1)]

    for deltas in [*cuts, list(text)]:
        given_out, stop = streamed(deltas, stops, include)
        assert expected == ("".join(given_out), stop)


@given(deltas=DELTAS, stops=STOPS)
def test_holds_back_only_the_beginning_of_a_stop_string(deltas: list[str], stops: tuple[str, ...]) -> None:
    """After each delta, what is missing is exactly the longest end of the text that may become a stop string."""
    given_out, stop = streamed(deltas, stops, include=False)
    for i in range(len(deltas)):
        text, shown = "".join(deltas[: i + 1]), "".join(given_out[: i + 1])
        if stop is not None and i >= len(given_out) - 1:
            break
        held = max(k for s in stops for k in range(len(s)) if text.endswith(s[:k]))
        assert text[: len(text) - held] == shown


@pytest.mark.parametrize("include", [False, True])
def test_inactive_matches_are_text(include: bool) -> None:
    """Before min_tokens a whole stop string is text; one that began before and ends after counts."""
    matcher = StopMatcher(("END",), include=include)

    assert matcher.push("a END b E", active=False) == "a END b "
    assert matcher.push("ND c", active=True) == StopMatch("END" if include else "", "END")


def test_empty_stop_strings_are_ignored() -> None:
    """An empty string would stop everything."""
    assert streamed(["ab", "c"], ("", "c"), include=False) == (["ab", ""], "c")
