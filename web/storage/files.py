"""Files and batches on disk: a JSON record for each, and the bytes of files beside theirs.

Records are replaced as a whole (written beside, then renamed), so a reader sees an old one or a new one. A file's
record comes after its bytes. A batch's record is written by the ingress that makes it, and from then on only by the
jobs actor that works on it; what clients want of it meanwhile is a file beside it, ``<id>.cancel``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from pagebus.actors.settings import Settings, SettingsError
from pagebus.web.access.key_share import key_share
from pagebus.web.http.errors import bad_field

ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
Record = dict[str, Any]
"""The record of a file or a batch: the object that clients see, and ``owner``, the key that made it. A batch's also has
the key's ``weight``, its salt if its cache is private, the expiry of its result files, and their ids once they are
being made. ``deployment`` is the one that works on it."""
HIDDEN = frozenset({"owner", "weight", "cache_salt", "output_expires_s", "result_ids", "deployment"})
UPLOAD_TIMEOUT_S = 600.0
"""Seconds within which the bytes of a file must arrive."""
MAX_FILES = 20_000
"""The most files of all owners: each also has a record, however small it is."""
MAX_ENDED = 1000
"""The most finished batches of one owner that are kept."""
OVER = ("failed", "completed", "expired", "cancelled")
"""Final states of a batch."""


class Full(Exception):
    """There is no room for another file."""


class ShareUsed(Exception):
    """The owner has reached its limit: at most ``most`` of ``what``."""

    def __init__(self, what: str, most: int) -> None:
        super().__init__(what, most)
        self.what, self.most = what, most


class Known(NamedTuple):
    """The constant part of a file's record. ``owner`` is a :func:`tag_of` one."""

    owner: str
    expires_at: int | None


def new_id(prefix: str) -> str:
    """Ids sort by age, to the second."""
    return f"{prefix}{int(time.time()):08x}{secrets.token_hex(8)}"


def tag_of(owner: str) -> str:
    """The tag of an owner in file names."""
    return hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:16] if owner else ""


class Store:
    """``max_bytes`` limits all files together."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._known: dict[str, Known] = {}
        """Constant parts of the records of counted files."""
        self.making = asyncio.Lock()
        """Held while batches are counted and one is added."""
        self.lock = folder / "lock"
        """A file that actors lock while they queue batches again."""
        folder.mkdir(parents=True, exist_ok=True)

    # -- records ------------------------------------------------------------------------------------------------------
    def save(self, record: Record) -> None:
        """Store a record, whole or not at all."""
        path = self._folder / f"{record['id']}.json"
        beside = path.with_suffix(f".{secrets.token_hex(4)}.new")
        try:
            with beside.open("wb") as file:
                file.write(orjson.dumps(record))
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)  # a full disk must not get fuller with each try
            raise

    def find(self, record_id: str, owner: str | None = None) -> Record | None:
        """The record, if it exists, belongs to this owner (None: any) and has not expired."""
        if not ID.fullmatch(record_id):
            return None
        try:
            record: Record = orjson.loads((self._folder / f"{record_id}.json").read_bytes())
        except FileNotFoundError:
            return None
        if record["object"] == "file" and record["expires_at"] is not None and record["expires_at"] < time.time():
            self.delete(record_id)
            return None
        return record if owner in (None, record["owner"]) else None

    def all(self, prefix: str, owner: str) -> list[Record]:
        """All records of an owner, the newest first."""
        names = sorted((path.stem for path in self._folder.glob(f"{prefix}*.json")), reverse=True)
        return [record for name in names if (record := self.find(name, owner)) is not None]

    def delete(self, record_id: str) -> None:
        """Delete a file or a batch, its record first."""
        for suffix in (".json", ".data", ".cancel"):
            (self._folder / f"{record_id}{suffix}").unlink(missing_ok=True)

    # -- bytes of files -----------------------------------------------------------------------------------------------
    def data(self, file_id: str) -> Path:
        """The path of a file's bytes."""
        return self._folder / f"{file_id}.data"

    def num_bytes(self) -> int:
        """Bytes of all files, and of uploads under way here."""
        return self._held()[0].total()

    def _held(self) -> tuple[Counter[str], Counter[str]]:
        """Bytes and number of files by the tag of their owners. Expired files are deleted."""
        num_bytes, num_files = Counter[str](), Counter[str]()
        known: dict[str, Known] = {}
        for path in self._folder.iterdir():
            if path.suffix in (".data", ".part"):
                with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
                    size, owner = path.stat().st_size, self._owner_of(path, known)
                    if owner is not None:
                        num_bytes[owner] += size
                        num_files[owner] += 1
        self._known = known  # and not what has gone
        return num_bytes, num_files

    def _owner_of(self, path: Path, known: dict[str, Known]) -> str | None:
        """The tag of the owner of these bytes; "": it cannot be told yet, None: they have just gone. What is read of a
        file is noted as ``known``."""
        if path.suffix == ".part":
            if path.stat().st_mtime >= time.time() - UPLOAD_TIMEOUT_S:
                return path.stem.partition(".")[2]
            path.unlink()  # its ingress has died
            return None
        file = self._known.get(path.stem)
        if file is None:
            if (record := self.find(path.stem)) is None:
                return "" if path.exists() else None
            file = Known(tag_of(record["owner"]), record["expires_at"])
        elif file.expires_at is not None and file.expires_at < time.time():
            self.delete(path.stem)
            return None
        known[path.stem] = file
        return file.owner

    def check_room(self, owner: str, *, alone: bool) -> None:
        """Check the limits on files and bytes, in total and of an owner. An owner that is ``alone`` shares with no
        other.

        Raises:
            Full, ShareUsed: there are.
        """
        (num_bytes, num_files), tag = self._held(), tag_of(owner)
        for what, held, limit in (("bytes of files", num_bytes, self._max_bytes), ("files", num_files, MAX_FILES)):
            if held.total() > limit:
                raise Full
            if held[tag] > (most := key_share(limit, held, tag, alone=alone)):
                raise ShareUsed(what, most)

    @contextlib.contextmanager
    def upload(self, owner: str) -> Iterator[Path]:
        """A temporary path for the bytes of a new file; they are deleted unless :meth:`add` takes them."""
        beside = self._folder / f"{secrets.token_hex(12)}.{tag_of(owner)}.part"
        try:
            yield beside
        finally:
            beside.unlink(missing_ok=True)

    def add(
        self,
        beside: Path,
        filename: str,
        purpose: str,
        owner: str,
        expires_s: int | None,
        *,
        file_id: str | None = None,
    ) -> Record:
        """Make a file of bytes on this disk; they stay where they are if there is no room for its record."""
        now = int(time.time())
        record: Record = {
            "id": file_id or new_id("file-"),
            "object": "file",
            "bytes": beside.stat().st_size,
            "created_at": now,
            "expires_at": None if expires_s is None else now + expires_s,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
            "owner": owner,
        }
        beside.replace(self.data(record["id"]))
        try:
            self.save(record)
        except OSError:
            self.data(record["id"]).replace(beside)
            raise
        return record

    def take_back(self, file_id: str, beside: Path) -> None:
        """Undo :meth:`add`, as far as it came."""
        with contextlib.suppress(FileNotFoundError):
            self.data(file_id).replace(beside)
        self.delete(file_id)

    # -- batches ------------------------------------------------------------------------------------------------------
    def partial(self, batch_id: str, kind: str) -> Path:
        """The path where lines of a batch's output or errors are collected."""
        return self._folder / f"{batch_id}.{kind}.partial"

    def num_under_way(self, owner: str) -> int:
        """The number of an owner's unfinished batches."""
        return sum(batch["status"] not in OVER for batch in self.all("batch_", owner))

    def signs_of_life(self, deployment: str) -> dict[str, tuple[int, ...]]:
        """What changes while an actor works on them, by id: of all unfinished batches of a deployment."""
        found: dict[str, tuple[int, ...]] = {}
        for path in self._folder.glob("batch_*.json"):
            record = self.find(path.stem)
            if record is not None and record["status"] not in OVER and record.get("deployment") == deployment:
                with contextlib.suppress(FileNotFoundError):
                    files = [each for each in (path, self.partial(path.stem, "output")) if each.exists()]
                    found[path.stem] = tuple(each.stat().st_mtime_ns for each in files)
        return found

    def forget_ended(self, owner: str) -> None:
        """Delete an owner's oldest finished batches, if there are too many. (Their files stay.)"""
        ended = [batch["id"] for batch in self.all("batch_", owner) if batch["status"] in OVER]
        for batch_id in ended[MAX_ENDED:]:
            self.delete(batch_id)

    def cancel(self, batch_id: str) -> None:
        """Request the cancellation of a batch."""
        (self._folder / f"{batch_id}.cancel").touch()

    def cancelled_at(self, batch_id: str) -> int | None:
        """The time of that request."""
        try:
            return int((self._folder / f"{batch_id}.cancel").stat().st_mtime)
        except FileNotFoundError:
            return None


def open_store(settings: Settings) -> Store | None:
    """The store of a deployment; None if it stores no files.

    Raises:
        SettingsError: its folder cannot be had.
    """
    if not settings.files_dir:
        return None
    try:
        return Store(Path(settings.files_dir), settings.max_files_bytes)
    except OSError as error:
        raise SettingsError(f"--files-dir {settings.files_dir}: {error.strerror}") from error


def shown(record: Record) -> Record:
    """The part of a record that clients see."""
    return {name: value for name, value in record.items() if name not in HIDDEN}


def page(records: list[Record], after: str | None, limit: int, *, oldest_first: bool = False) -> Record:
    """A part of a list, as OpenAI's clients page through it.

    Raises:
        ApiError: 400, ``after`` is no id of such a list.
    """
    if after is not None:
        records = _behind(records, after, oldest_first=oldest_first)
    chosen = [shown(record) for record in records[:limit]]
    return {
        "object": "list",
        "data": chosen,
        "first_id": chosen[0]["id"] if chosen else None,
        "last_id": chosen[-1]["id"] if chosen else None,
        "has_more": len(records) > limit,
    }


def _behind(records: list[Record], after: str, *, oldest_first: bool) -> list[Record]:
    """Records behind the one of this id. It may be gone, because clients delete what they have read: ids of files and
    batches say where it was."""
    for place, record in enumerate(records):
        if record["id"] == after:
            return records[place + 1 :]
    if not ID.fullmatch(after):
        raise bad_field("after", "must be the last id of the page before")
    return [record for record in records if (record["id"] > after) == oldest_first]
