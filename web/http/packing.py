"""Compression of responses to the page: whole files once, event streams incrementally."""

from __future__ import annotations

import gzip
import zlib

GZIP_WINDOW = 31
"""zlib's way of saying: the largest window, in gzip's format."""
STREAM_LEVEL = 3
"""Compression level of event streams. Each page's stream is compressed separately, and events repeat one another, so a
higher level gains little."""


def takes_gzip(accept_encoding: str) -> bool:
    """Whether a client takes gzip, by its ``Accept-Encoding``."""
    for part in accept_encoding.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.strip().removeprefix("q=").strip("0.") != "" if weight else True
    return False


def packed(body: bytes) -> bytes | None:
    """A body in gzip, the same bytes each time; None where that spares less than a tenth."""
    found = gzip.compress(body, mtime=0)
    return found if len(found) < 0.9 * len(body) else None


class Packer:
    """Compresses one event stream, if its client takes that: every write can be read at once."""

    def __init__(self, accept_encoding: str) -> None:
        self._zlib = zlib.compressobj(STREAM_LEVEL, zlib.DEFLATED, GZIP_WINDOW) if takes_gzip(accept_encoding) else None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {"Vary": "Accept-Encoding"} | ({} if self._zlib is None else {"Content-Encoding": "gzip"})

    def pack(self, data: bytes) -> bytes:
        """The bytes to write for these."""
        if self._zlib is None:
            return data
        return self._zlib.compress(data) + self._zlib.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        """The last bytes."""
        return b"" if self._zlib is None else self._zlib.flush()
