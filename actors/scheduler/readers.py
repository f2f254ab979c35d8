"""Who gets the replies to a request: clients that have asked for the same one, each at an ingress of its own.

An ingress counts once, with the attempt that it has made last: of several clients there it knows itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Reader:
    """An ingress, its attempt, and the place of that among all. ``gone``: nobody listens there any more; it is known
    still, so that what was held up on its way can be told from somebody new."""

    ingress: str
    attempt: str
    asked: int
    gone: bool = False


class Readers:
    """Iterates over those that read. ``awaited``: somebody has left who may come back, while others read on."""

    __slots__ = ("_all", "awaited")

    def __init__(self, *readers: Reader) -> None:
        self._all = list(readers)
        self.awaited = False

    def __iter__(self) -> Iterator[Reader]:
        return (each for each in self._all if not each.gone)

    @property
    def newest(self) -> Reader:
        """Who has asked last of those that read, or of all, if nobody does."""
        return max(reversed([*self] or self._all), key=lambda each: each.asked)

    @property
    def asked(self) -> int:
        """The place of the last attempt, be it of somebody who has gone."""
        return max(each.asked for each in self._all)

    @property
    def ingresses(self) -> tuple[str, ...]:
        """Where replies go, at least one; the newest first."""
        newest = self.newest
        return newest.ingress, *(each.ingress for each in self if each is not newest)

    @property
    def addresses(self) -> list[str]:
        """Of those that have gone, too."""
        return [each.ingress for each in self._all]

    @property
    def attempts(self) -> list[str]:
        """Of those that have gone, too."""
        return [each.attempt for each in self._all]

    def of(self, attempt: str) -> Reader | None:
        """Whose attempt it is; perhaps he has gone."""
        return next((each for each in self._all if each.attempt == attempt), None)

    def at(self, ingress: str) -> Reader | None:
        return next((each for each in self._all if each.ingress == ingress), None)

    def join(self, reader: Reader) -> None:
        """One more, in place of the one before at its ingress. Who was awaited is perhaps this one."""
        self._all = [each for each in self._all if each.ingress != reader.ingress]
        self._all.append(reader)
        self.awaited = False

    def replace(self, reader: Reader) -> None:
        """This one instead of all."""
        self._all, self.awaited = [reader], False

    def part(self, reader: Reader, *, may_return: bool) -> bool:
        """One of them reads no more. Whether others do."""
        reader.gone = True
        others = any(True for _ in self)
        self.awaited |= may_return and others
        return others
