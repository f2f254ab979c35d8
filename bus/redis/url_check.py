"""Checks that a bus URL is well formed, without the client library and without repeating a password."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

HINT = "in a user or password write %40 for @, %2F for /, %3F for ?, %23 for # and %25 for %, or use --redis-password"


def url_problem(url: str) -> str | None:
    """Why the URL of a Redis server cannot be understood; None: nothing is wrong with its form.

    A password with one of ``@ / ? #`` in it ends the address early. The rest must not be taken for a host or an option,
    nor be shown: the text repeats nothing of the URL but its scheme.
    """
    scheme = url.partition("://")[0]
    shown = f"cannot understand the bus URL ({scheme}://...)"
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        if scheme in ("redis", "rediss"):
            _ = parts.port  # raises what its text has in it
    except ValueError:
        return f"{shown}: its port is no number; {HINT}"
    if "#" in url or "@" in parts.query:
        return f"{shown}: {HINT}"
    if scheme == "unix":
        return f"{shown}: a socket has no host; {HINT}" if host else None
    if "@" in parts.path:
        return f"{shown}: {HINT}"
    if scheme in ("redis", "rediss") and not re.fullmatch(r"/?\d*", parts.path):
        return f"{shown}: its path is the number of a database; {HINT}"
    return None
