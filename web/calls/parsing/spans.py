"""Character spans of reasoning in a text, for all parsers."""

from __future__ import annotations


class ReasoningSpans:
    """Follows a parser: is given what the parser reads, and what of it has turned out to be reasoning.

    ``spans`` are the places found so far, [begin, end) in characters of the whole text, in order.
    """

    def __init__(self) -> None:
        self.spans: list[list[int]] = []
        self._unplaced = ""
        """The text behind the last reasoning that was found."""
        self._begin = 0
        """Where that begins."""

    def feed(self, text: str) -> None:
        """The parser is given more text."""
        self._unplaced += text

    def found(self, reasoning: str, *, is_last: bool) -> None:
        """Some of what was fed is reasoning. ``is_last``: nothing behind it has been recognised yet, so it is the last
        such text there is; else the first, as a mark and other text follow."""
        if self.spans and self._unplaced.startswith(reasoning):
            place = 0
        else:
            place = self._unplaced.rfind(reasoning) if is_last else self._unplaced.find(reasoning)
        begin = self._begin + max(place, 0)
        end = begin + len(reasoning)
        if self.spans and self.spans[-1][1] == begin:
            self.spans[-1][1] = end
        else:
            self.spans.append([begin, end])
        self._unplaced, self._begin = self._unplaced[end - self._begin :], end
