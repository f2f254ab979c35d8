"""Readers of a request: the clients that requested the same answer, each at its own ingress.

An ingress counts once, with its latest attempt. It distributes replies among its own clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Reader:
    """An ingress, its attempt, and the attempt's place among all attempts. ``gone``: it no longer reads; it is
    remembered so that its delayed messages can be told from a new reader's."""

    ingress: str
    attempt: str
    asked: int
    gone: bool = False


class Readers:
    """The readers of one request. Iterates over those still reading. ``awaited``: one has left and may return, while
    others read on."""

    __slots__ = ("_all", "awaited")

    def __init__(self, *readers: Reader) -> None:
        self._all = list(readers)
        self.awaited = False

    def __iter__(self) -> Iterator[Reader]:
        return (each for each in self._all if not each.gone)

    @property
    def newest(self) -> Reader:
        """The latest reader of those still reading, or of all if none is."""
        return max(reversed([*self] or self._all), key=lambda each: each.asked)

    @property
    def asked(self) -> int:
        """The place of the latest attempt, including readers that have gone."""
        return max(each.asked for each in self._all)

    @property
    def told(self) -> tuple[Reader, ...]:
        """To whom replies go, at least one, newest first."""
        newest = self.newest
        return newest, *(each for each in self if each is not newest)

    @property
    def ingresses(self) -> tuple[str, ...]:
        """The ingresses of those."""
        return tuple(each.ingress for each in self.told)

    @property
    def addresses(self) -> list[str]:
        """Ingresses of all readers, including those gone."""
        return [each.ingress for each in self._all]

    @property
    def attempts(self) -> list[str]:
        """Attempts of all readers, including those gone."""
        return [each.attempt for each in self._all]

    def of(self, attempt: str) -> Reader | None:
        """The reader with this attempt, gone or not."""
        return next((each for each in self._all if each.attempt == attempt), None)

    def at(self, ingress: str) -> Reader | None:
        return next((each for each in self._all if each.ingress == ingress), None)

    def join(self, reader: Reader) -> None:
        """Add a reader, replacing the earlier one at its ingress. It may be the one awaited."""
        self._all = [each for each in self._all if each.ingress != reader.ingress]
        self._all.append(reader)
        self.awaited = False

    def replace(self, reader: Reader) -> None:
        """Replace all readers by this one."""
        self._all, self.awaited = [reader], False

    def part(self, reader: Reader, *, may_return: bool) -> bool:
        """Mark a reader as gone; returns whether others still read."""
        reader.gone = True
        others = any(True for _ in self)
        self.awaited |= may_return and others
        return others
