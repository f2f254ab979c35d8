"""Faults of executors during a simulated run, written as in ``kill executor-3 at 12.5; add 2 at 20``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_FAULT = re.compile(r"(kill|drain)\s+(\S+)\s+at\s+([\d.]+)|(add)\s+(\d+)\s+at\s+([\d.]+)")


class FaultError(ValueError):
    """Not a fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``kill`` or ``drain`` the ``executor``, or ``add`` ``count`` executors, ``at_s`` seconds after the start."""

    verb: Literal["kill", "drain", "add"]
    at_s: float
    executor: str = ""
    count: int = 0


def parse_faults(text: str) -> list[Fault]:
    """Faults separated by ``;``, in order of time.

    Raises:
        FaultError: a part is no fault.
    """
    faults = []
    for part in filter(None, (each.strip() for each in text.split(";"))):
        found = _FAULT.fullmatch(part)
        if found is None:
            raise FaultError(
                f"{part!r}: write 'kill NAME at SECONDS', 'drain NAME at SECONDS' or 'add NUMBER at SECONDS'"
            )
        verb, name, leave_s, _, count, add_s = found.groups()
        try:
            if verb is None:
                faults.append(Fault("add", float(add_s), count=int(count)))
            else:
                faults.append(Fault("kill" if verb == "kill" else "drain", float(leave_s), executor=name))
        except ValueError as error:
            raise FaultError(f"{part!r}: {error}") from error
    return sorted(faults, key=lambda fault: fault.at_s)
