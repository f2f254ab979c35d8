"""Processes one batch of ``/v1/batches``: each line of its input file is a job; results go to files.

Answered lines are appended to the partial output. A batch that is taken up again continues with the lines that are not
in it, and requests under way are joined. No other progress is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

import orjson

from pagebus.actors.telemetry.logs import Log
from pagebus.web.jobs.lines import LineError, Result, custom_id_of, read_line, size_problem, unanswered
from pagebus.web.jobs.tally import Tally
from pagebus.web.jobs.window import Owner, Window
from pagebus.web.jobs.worker import Worker
from pagebus.web.storage.files import Record, Store, new_id

P = ParamSpec("P")
T = TypeVar("T")
SHOW_S = 1.0
"""Seconds between updates of a batch's record while it runs."""
MAX_ERRORS = 100
"""The most errors of an invalid input file that its record lists."""
CANCELLED = ("batch_cancelled", "The batch was cancelled before this was done.")
EXPIRED = ("batch_expired", "The batch expired before this was done.")
GONE = ("file_not_found", "The input file is gone.")
RESULTS = ("output", "errors")
"""The kinds of files that a batch makes."""


@dataclass(slots=True)
class Progress:
    """The two open output files of a batch, and the custom ids of their lines."""

    output: BinaryIO
    errors: BinaryIO
    done: set[str] = field(default_factory=set)
    completed: int = 0
    failed: int = 0
    tally: Tally = field(default_factory=Tally)

    def add(self, result: Result) -> None:
        """Add a line. (It is flushed to the system at once, since this process may die.)"""
        file = self.errors if result.failed else self.output
        file.write(result.text().encode() + b"\n")
        file.flush()
        self.done.add(str(result.custom_id))
        self.completed += not result.failed
        self.failed += result.failed
        self.tally.add(result.line)

    def close(self) -> None:
        for file in (self.output, self.errors):
            os.fsync(file.fileno())
            file.close()


class BatchRun:
    """Processes one batch. ``stopped`` gives the code and text of the reason why the rest is not computed. ``is_ours``:
    whether no other actor has taken it over. ``count`` counts lines by their outcomes."""

    def __init__(
        self,
        store: Store,
        batch: Record,
        worker: Worker,
        window: Window,
        max_lines: int,
        log: Log,
        is_ours: Callable[[], Awaitable[bool]],
        count: Callable[[str, int], None],
    ) -> None:
        self._store, self.batch, self._worker, self._window = store, batch, worker, window
        self._owner = Owner(batch["owner"], batch.get("weight", 1.0))
        self._max_lines = max_lines
        self._log = log
        self._is_ours, self._count = is_ours, count
        self._stopped: tuple[str, str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        """Of the first task that could not write: what it had to write is in no file, so the run must not end well."""

    async def run(self) -> None:
        """Process the batch to its end; after a cancellation it can be started again."""
        batch, path = self.batch, self._store.data(self.batch["input_file_id"])
        if batch["status"] == "validating" and self._stopped:
            return self.fail(*self._stopped)
        if batch["status"] == "validating":
            errors, total = await asyncio.to_thread(
                check_file, path, batch["endpoint"], self._max_lines, self._worker.max_line_bytes
            )
            if not await self._is_ours():
                return
            if errors:
                self._note("failed", errors={"object": "list", "data": errors})
                return
            self._note("in_progress", request_counts={"total": total, "completed": 0, "failed": 0})
        if await asyncio.to_thread(self._is_gone):
            self._stopped = self._stopped or GONE
        self._check_wanted()  # before the first line, and should it have ended while it was being finalized
        # Not opened in the thread: it goes on when this task is cancelled, and nobody would close the files.
        progress = self._go_on(*await to_its_end(self._take_up))
        watching = self._begin(self._watch(progress))
        try:
            if not self._stopped:
                await self._work(path, progress)
        finally:
            await end(watching, *self._tasks)
            progress.close()
        self._raise_failure()
        if await self._is_ours():
            answered = progress.failed
            await to_its_end(self._finish, path, progress)
            self._count("cancelled", progress.failed - answered)

    # -- lines --------------------------------------------------------------------------------------------------------
    async def _work(self, path: Path, progress: Progress) -> None:
        """Process every line that is not done, as many at a time as there is room for."""
        for number, text in lines_of(path):
            if str(custom_id_of(text)) in progress.done:
                await asyncio.sleep(0)  # thousands may be done, and others must have their turn meanwhile
                continue
            while not self._stopped and not self._window.room(self._owner):
                await self._window.freed(SHOW_S, self._owner)
            self._raise_failure()
            if self._stopped:
                break
            self._window.enter(len(text), self._owner)
            self._tasks.add(self._begin(self._line(number, text, progress)))
        while self._tasks and not (self._stopped or self._failure):
            await asyncio.wait(self._tasks, timeout=SHOW_S)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._failure = self._failure or task.exception()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _line(self, number: int, text: bytes, progress: Progress) -> None:
        job_id = f"{self.batch['id']}-{number}"
        try:
            result = await self._worker.run(job_id, text, cache_salt=self.batch["cache_salt"])
        except Exception as error:
            self._log.exception("line of a batch failed", id=job_id, error=repr(error))
            result = unanswered(job_id, custom_id_of(text), "internal_error", "The server's log has the id.")
        finally:
            self._window.leave(len(text), self._owner)
        if await self._is_ours():
            progress.add(result)
            self._count("failed" if result.failed else "completed", 1)

    async def _watch(self, progress: Progress) -> None:
        """Update the record with the progress, show a sign of life, and check whether the batch is still wanted."""
        while True:
            self._check_wanted()
            os.utime(progress.output.fileno())  # the sign of life that others look for
            counts = self._counts(progress)
            if counts != self.batch["request_counts"] and await self._is_ours():
                self._note("in_progress", request_counts=counts, **progress.tally.shown())
            await asyncio.sleep(SHOW_S)

    def _is_gone(self) -> bool:
        return not self._store.data(self.batch["input_file_id"]).exists()

    def _check_wanted(self) -> None:
        if self._store.cancelled_at(self.batch["id"]) is not None:
            self._stopped = CANCELLED
        elif time.time() >= self.batch["expires_at"]:
            self._stopped = EXPIRED

    def give_up(self, code: str, message: str) -> None:
        """Compute no more lines: :meth:`run` only ends the batch, with what it has."""
        self._stopped = (code, message)

    def fail(self, code: str, message: str) -> None:
        """Mark the batch as failed."""
        self._note("failed", errors=_listed(code, message))

    # -- records and files --------------------------------------------------------------------------------------------
    def _counts(self, progress: Progress) -> dict[str, int]:
        total = self.batch["request_counts"]["total"]
        return {"total": total, "completed": progress.completed, "failed": progress.failed}

    def _note(self, status: str, **changes: Any) -> None:
        """Set a new state, with its time."""
        first = self.batch["status"] != status
        self.batch.update(status=status, **changes, **({f"{status}_at": int(time.time())} if first else {}))
        self._store.save(self.batch)

    def _partials(self) -> list[Path]:
        """Of answers and of errors."""
        return [self._store.partial(self.batch["id"], kind) for kind in RESULTS]

    def _take_up(self) -> tuple[list[set[str]], Tally]:
        """What the files hold as they were left: the ids of each, and what these lines used. A partial last line is
        dropped. Files that an actor had made before it died are collected in again."""
        for kind, file_id in self.batch.get("result_ids", {}).items():
            self._store.take_back(file_id, self._store.partial(self.batch["id"], kind))
        tally = Tally()
        return [whole_lines(path, tally) for path in self._partials()], tally

    def _go_on(self, ids: list[set[str]], tally: Tally) -> Progress:
        """Open the files, behind what they hold."""
        output, errors = (path.open("ab") for path in self._partials())
        return Progress(output, errors, set().union(*ids), len(ids[0]), len(ids[1]), tally)

    def _finish(self, path: Path, progress: Progress) -> None:
        """Turn the partial output into files and update the record. The record names them first: whoever takes the
        batch up after a failure finds them."""
        if self._stopped:
            self._list_undone(path, progress)
        partials = {
            kind: partial for kind, partial in zip(RESULTS, self._partials(), strict=True) if _has_lines(partial)
        }
        made = {kind: new_id("file-") for kind in partials}
        self._note("finalizing", request_counts=self._counts(progress), result_ids=made, **progress.tally.shown())
        batch_id, owner, expires_s = self.batch["id"], self.batch["owner"], self.batch["output_expires_s"]
        for kind, partial in partials.items():
            self._store.add(partial, f"{batch_id}_{kind}.jsonl", "batch_output", owner, expires_s, file_id=made[kind])
        for partial in self._partials():
            partial.unlink(missing_ok=True)
        self._end({"output_file_id": made.get("output"), "error_file_id": made.get("errors")})

    def _end(self, changes: dict[str, Any]) -> None:
        """Note how the batch has ended."""
        status = {None: "completed", CANCELLED: "cancelled", EXPIRED: "expired"}.get(self._stopped, "failed")
        if status == "cancelled":
            changes["cancelling_at"] = self._store.cancelled_at(self.batch["id"])
        if status == "failed" and self._stopped:
            changes["errors"] = _listed(*self._stopped)
        self._note(status, **changes)

    def _list_undone(self, path: Path, progress: Progress) -> None:
        """List lines that are not done as errors, unless the input file is gone."""
        assert self._stopped is not None
        with self._store.partial(self.batch["id"], "errors").open("ab") as file, contextlib.suppress(FileNotFoundError):
            for number, text in lines_of(path):
                if (custom_id := str(custom_id_of(text))) not in progress.done:
                    result = unanswered(f"{self.batch['id']}-{number}", custom_id, *self._stopped)
                    file.write(result.text().encode() + b"\n")
                    progress.failed += 1


def _listed(code: str, message: str) -> dict[str, Any]:
    """An error of a whole batch, in the list of its record."""
    return {"object": "list", "data": [{"code": code, "line": None, "message": message, "param": None}]}


def _has_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


async def end(*tasks: asyncio.Task[None]) -> None:
    """Cancel, and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_its_end(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Do ``work`` in a thread, to its end also when the task is cancelled: whoever goes on with the batch must find its
    files at rest."""
    working = asyncio.create_task(asyncio.to_thread(work, *args, **options))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def lines_of(path: Path, max_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, by number from 1; of one that is longer than ``max_bytes`` no more than a byte more.
    A byte order mark before the first is no part of it."""
    size = -1 if max_bytes is None else max_bytes + 1
    with path.open("rb") as file:
        if file.read(len(BOM_UTF8)) != BOM_UTF8:
            file.seek(0)
        for number, line in enumerate(iter(lambda: file.readline(size), b""), 1):
            if line.strip():
                yield number, line.strip()


def check_file(path: Path, endpoint: str, max_lines: int, max_line_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """Errors in a batch's input file, and the number of its requests."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    count = 0

    def wrong(number: int | None, code: str, message: str) -> None:
        if len(errors) < MAX_ERRORS:
            errors.append({"code": code, "line": number, "message": message, "param": None})

    if not path.exists():
        wrong(None, *GONE)
        return errors, 0
    for number, text in lines_of(path, max_line_bytes):
        count += 1
        if problem := size_problem(text, max_line_bytes):
            wrong(number, "line_too_long", problem)
            break
        try:
            line = read_line(text)
        except LineError as error:
            wrong(number, "invalid_json_line", str(error))
            continue
        if line.url != endpoint:
            wrong(number, "mismatched_url", f"url: must be {endpoint}, as the batch says")
        if line.custom_id in seen:
            wrong(number, "duplicate_custom_id", f"custom_id: {line.custom_id[:100]} is there already")
        seen.add(line.custom_id)
        if count > max_lines:
            wrong(number, "too_many_lines", f"A file may have at most {max_lines} requests (--max-batch-lines).")
            break
    if not count:
        wrong(None, "empty_file", "The input file has no requests.")
    return errors, count


def whole_lines(path: Path, tally: Tally) -> set[str]:
    """Custom ids of the lines of a file, which is cut after its last whole one; they are added to ``tally``."""
    ids: set[str] = set()
    if not path.exists():
        return ids
    size = 0
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(orjson.JSONDecodeError):
                if not line.endswith(b"\n"):
                    break
                told = orjson.loads(line)
                ids.add(str(told["custom_id"]))
                tally.add(told)
                size += len(line)
                continue
            break
    os.truncate(path, size)
    return ids
