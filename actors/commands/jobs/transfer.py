"""Between files and the stream of jobs, line by line: files of millions of lines take no more memory than short ones.

A batch is known by its name. Its counters say how many lines were submitted, what became of them, and (``total``) how
many there are once all have been submitted; its results lie on a stream of their own until they are collected.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from pagebus.bus.contract import COUNTERS_KEPT_S, START, Bus
from pagebus.bus.messages import Job, JobResult
from pagebus.bus.streams import Names

CHUNK_LINES = 500
MAX_QUEUED = 50_000
"""Entries that the stream of jobs may have for more to be added: what is beyond them waits in the file."""
POLL_S = 0.2
READ_BLOCK_MS = 1000
OUTCOMES = ("completed", "failed", "cancelled")
"""The counters of lines that have ended."""
HEAD_BYTES = 2**16
Show = Callable[[str, float | None, str], None]
"""Shows a phase, how far it has come, 0 to 1, and what that is in numbers."""


def batch_of(path: Path) -> str:
    """The name of a file's batch: the same one each time, and another if the file is."""
    with path.open("rb") as file:
        digest = hashlib.blake2b(
            f"{path.resolve()}\0{path.stat().st_size}\0".encode() + file.read(HEAD_BYTES), digest_size=6
        )
    return f"{re.sub('[^A-Za-z0-9_.-]', '-', path.stem)[:80]}-{digest.hexdigest()}"


class Line(NamedTuple):
    """A line of a file of requests, its number from 1, and which share of the file ends with it."""

    number: int
    text: str
    share: float


def lines_of(path: Path, skip: int = 0) -> Iterator[Line]:
    """Lines that are not blank, without the first ``skip``. A byte order mark before the first is no part of it."""
    position, size = 0, path.stat().st_size
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            position += len(raw)
            text = (raw.removeprefix(BOM_UTF8) if number == 1 else raw).strip()
            if not text:
                continue
            if skip:
                skip -= 1
                continue
            yield Line(number, text.decode(errors="backslashreplace"), position / size)


async def submit(bus: Bus, names: Names, path: Path, batch: str, show: Show, *, priority: int = 0) -> int:
    """Add what has not been submitted of a file yet; returns how many lines it has."""
    (counters,) = await bus.counters(names.batch(batch))
    done = counters.get("submitted", 0)
    if counters.get("total"):
        return counters["total"]
    told = {"reply_to": names.batch_results(batch), "batch": batch, "priority": str(priority) if priority else ""}
    chunk: list[tuple[str, Job]] = []
    for line in lines_of(path, done):
        chunk.append((names.jobs, Job(request=line.text, **told)))
        if len(chunk) == CHUNK_LINES:
            done += await _push(bus, names, batch, chunk)
            chunk = []
            show("submitted", line.share, f"{done} lines")
    done += await _push(bus, names, batch, chunk)
    await bus.count({names.batch(batch): {"total": done}}, ttl_s=COUNTERS_KEPT_S)
    return done


async def _push(bus: Bus, names: Names, batch: str, chunk: list[tuple[str, Job]]) -> int:
    while await bus.length(names.jobs) > MAX_QUEUED:  # noqa: ASYNC110 (there is no event for it)
        await asyncio.sleep(POLL_S)
    await bus.publish(chunk)
    await bus.count({names.batch(batch): {"submitted": len(chunk)}}, ttl_s=COUNTERS_KEPT_S)
    return len(chunk)


class Output:
    """The file of results. One that is in it already, because it came twice or was collected before, is not added."""

    def __init__(self, path: Path) -> None:
        self._seen: set[int] = set()
        if path.exists():
            _cut_torn_line(path)
            with path.open("rb") as file:
                self._seen = {_mark(line) for line in file if line.strip()}
        self._file = path.open("ab")

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, result: str) -> None:
        line = result.encode() + b"\n"
        mark = _mark(line)
        if mark not in self._seen:
            self._seen.add(mark)
            self._file.write(line)

    def sync(self) -> None:
        """What was added survives a power cut from now on."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _mark(line: bytes) -> int:
    """Eight bytes that stand for the id of a result."""
    found = orjson.loads(line)
    return int.from_bytes(hashlib.blake2b(str(found.get("id")).encode(), digest_size=8).digest(), "big")


def _cut_torn_line(path: Path) -> None:
    """Drop the end of a line whose writing was interrupted: its result is still on the stream."""
    with path.open("rb+") as file:
        data = b""
        end = file.seek(0, os.SEEK_END)
        while end and b"\n" not in data:
            start = max(0, end - HEAD_BYTES)
            file.seek(start)
            data = file.read(end - start)
            last = data.rfind(b"\n")
            if last >= 0 or start == 0:
                file.truncate(start + last + 1)
            end = start


class ResultsMissing(Exception):
    """All lines are answered, and some results are neither in the file nor on the stream."""

    def __init__(self, path: Path, count: int, total: int) -> None:
        super().__init__(
            f"{path} has {count} of {total} results; the others were collected before, into another file. To compute "
            "them again, submit the requests with another --batch"
        )


async def collect(bus: Bus, names: Names, batch: str, path: Path, show: Show, *, wait: bool) -> dict[str, int]:
    """Write results to a file, with ``wait`` until no more will come; returns the counters. What is safely in the file
    is deleted from the stream.

    Raises:
        ResultsMissing: results are missing, and no more will come.
    """
    stream, output, position = names.batch_results(batch), Output(path), START
    try:
        while True:
            (counters,) = await bus.counters(names.batch(batch))
            total = counters.get("total")
            entries = await bus.read({stream: position}, block_ms=READ_BLOCK_MS if wait and len(output) != total else 0)
            for entry in entries:
                position = entry.id
                if isinstance(entry.message, JobResult):
                    output.add(entry.message.result)
            if entries:
                output.sync()
                await bus.trim(stream, position)
            known = total or max(counters.get("submitted", 0), len(output))
            show("answered", len(output) / total if total else None, f"{len(output)} of {known}")
            is_whole = total is not None and len(output) >= total
            is_over = total is not None and sum(counters.get(name, 0) for name in OUTCOMES) >= total
            if not entries and is_over:
                await bus.delete(stream)
                if not is_whole:  # a result is stored together with its count
                    raise ResultsMissing(path, len(output), total or 0)
            if not entries and (is_whole or not wait):
                return counters
    finally:
        output.close()
