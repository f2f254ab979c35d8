"""Errors in the names that a client has used, where its body is read under other names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pagebus.web.http.errors import ApiError

FieldNames = Sequence[tuple[str, str]]
"""Pairs of a regular expression for the beginning of a path as it is read, and what stands there in the client's body.
The first that matches counts."""
_NAME = re.compile(r"^[a-z]\w*(?=:)|(?<![\w.'`-])(?=\w*[_.\[]\w)[a-z]\w*(?:\.\w+|\[\d+\])*")
"""What is taken for a field's name in the text of an error: the word before its first colon, or a path. Elsewhere a
single word ("messages") may be just that, and what is quoted comes from the client."""


@contextmanager
def naming(names: FieldNames) -> Iterator[None]:
    """Rename the fields in errors."""
    try:
        yield
    except ApiError as error:
        rename(error, names)
        raise


def rename(error: ApiError, names: FieldNames) -> ApiError:
    """``error``, with the names of the client in place of those that were read, also in its text."""
    message = _NAME.sub(lambda found: renamed(found[0], names), error.message)
    error.rename(renamed(error.param, names) if error.param else error.param, message)
    return error


def renamed(name: str, names: FieldNames) -> str:
    """What stands in the client's body in place of ``name``."""
    for pattern, there in names:
        new, count = re.subn(f"^{pattern}", there, name)
        if count:
            return new
    return name
