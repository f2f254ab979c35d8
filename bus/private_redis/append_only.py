"""Repairs the append-only file of a Redis server that does not start with it.

When its disk was full and has room again, Redis 7.0 continues the file at the wrong offset if the file had been
rewritten before. The part that could not be written stays in the file as a run of zeros, and the next start ends with
"Bad file format". The data behind such a hole is intact, so only the hole is removed. A file with other damage is cut
off at the damage (``redis-check-aof``). A file that cannot be read at all is replaced by an empty one. Damaged files
are kept in a folder beside it for inspection.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

AOF_FOLDER = "appendonlydir"
DAMAGE = re.compile(
    r"(Bad file format|Unexpected end of file) reading the append only file|Wrong signature trying to load DB"
    r"|Internal error in RDB|Short read or OOM loading DB|Wrong RDB checksum|Invalid AOF manifest file"
    r"|The AOF file .* doesn't exist"
)
"""Redis's log message for a file that it cannot load."""
OPEN_AGAIN = "Requests under way are asked for again"
CHECK_TIMEOUT_S = 600.0
_NOT_ZERO = re.compile(rb"[^\0]")


def remedies() -> tuple[Callable[[Path], str], ...]:
    """Repairs of a damaged file in the server's folder, the best first. Each returns what it has done and what is lost;
    "" if it does not help."""
    return fill_holes, cut_off, set_aside


def fill_holes(folder: Path) -> str:
    """Remove runs of zeros between commands."""
    cured = 0
    for path in sorted((folder / AOF_FOLDER).glob("*.aof")):
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is empty
            cured += _fill_holes_of(path, folder)
    if not cured:
        return ""
    return f"{cured} bytes of zeros were taken out of it, which a full disk had left; nothing is lost"


def _fill_holes_of(path: Path, folder: Path) -> int:
    """Remove the holes of a file; returns their size in bytes."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        parts = list(parts_between_holes(data))
        holes = len(data) - sum(end - start for start, end in parts)
        if not holes:
            return 0
        repaired = path.with_suffix(".repaired")
        with repaired.open("wb") as out:
            for start, end in parts:
                out.write(data[start:end])
    path.replace(_damaged_folder(folder) / path.name)
    repaired.replace(path)
    return holes


def parts_between_holes(data: bytes | mmap.mmap) -> Iterator[tuple[int, int]]:
    """(start, end) of the data between holes. Data that cannot be parsed as commands is left as it is."""
    start = place = 0
    while place < len(data):
        if data[place] != 0:
            following = _behind_command(data, place)
            if following is None:
                break
            place = following
            continue
        if place > start:
            yield start, place
        found = _NOT_ZERO.search(data, place)
        start = place = found.start() if found is not None else len(data)
    if start < len(data):
        yield start, len(data)


def _behind_command(data: bytes | mmap.mmap, place: int) -> int | None:
    """The end of the command, or time annotation, at ``place``; None if there is neither."""
    kind, (number, place) = data[place : place + 1], _number_line(data, place)
    if kind == b"#":
        return place or None
    if kind != b"*" or number is None:
        return None
    for _ in range(number):
        is_argument = data[place : place + 1] == b"$"
        length, place = _number_line(data, place)
        if not is_argument or length is None or place + length + 2 > len(data):
            return None
        place += length + 2
    return place


def _number_line(data: bytes | mmap.mmap, place: int) -> tuple[int | None, int]:
    """The number behind the first character of a line, if it is one, and where the next line begins (0: nowhere)."""
    end = data.find(b"\r\n", place, place + 64)
    if end < 0:
        return None, 0
    digits = data[place + 1 : end]
    return (int(digits) if digits.isdigit() else None), end + 2


def cut_off(folder: Path) -> str:
    """Have ``redis-check-aof`` cut everything off behind the damage."""
    program = shutil.which("redis-check-aof") or shutil.which("valkey-check-aof")
    manifest = folder / AOF_FOLDER / "appendonly.aof.manifest"
    if program is None or not manifest.exists():
        return ""
    before = _num_bytes(folder)
    kept = _damaged_folder(folder) / AOF_FOLDER
    with contextlib.suppress(OSError):  # no room for it: better without than not at all
        shutil.copytree(folder / AOF_FOLDER, kept)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([program, "--fix", str(manifest)], input=b"y\n", capture_output=True, timeout=CHECK_TIMEOUT_S)
    if (lost := before - _num_bytes(folder)) <= 0:
        return ""
    return f"its last {lost} bytes were cut off, and what was stored in them is lost: jobs, answers. {OPEN_AGAIN}"


def set_aside(folder: Path) -> str:
    """Start without any data."""
    path = folder / AOF_FOLDER
    if not path.is_dir():
        return ""
    path.replace(_damaged_folder(folder) / AOF_FOLDER)
    return f"it was set aside, and all that was stored is lost: queued jobs, batches, answers. {OPEN_AGAIN}"


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / AOF_FOLDER).glob("*.aof"))


def _damaged_folder(folder: Path) -> Path:
    """A new folder for damaged files."""
    number = 1
    while (path := folder / f"damaged-{number}").exists():
        number += 1
    path.mkdir(mode=0o700)
    return path
