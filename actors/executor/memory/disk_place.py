"""Finds an executor's own place below ``--disk-cache-dir``: a numbered folder that it locks while it lives.

An executor takes the first place that holds blocks of its own kind (of this model, these settings and this version),
else the first that nobody has locked, which it empties, else a new one. So there are never more places than executors
ran at once, and no names have to last from one start to the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pagebus.actors.settings import SettingsError

MODE = 0o700
_LOCK, _KIND, _BLOCKS = "lock", "kind", "blocks"


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """A place: the folder of its files, and the lock, an open file. The lock ends with the process."""

    blocks: Path
    lock: int

    def release(self) -> None:
        """Let others have it."""
        os.close(self.lock)


def take_place(folder: Path, identity: bytes) -> DiskPlace:
    """The place of an executor with this identity.

    Raises:
        SettingsError: the folder is another user's or a symbolic link, or others have access to it.
        OSError: it cannot be used.
    """
    _own(folder)
    free: list[tuple[Path, int]] = []
    try:
        for number in count():
            place = folder / str(number)
            if not place.exists() and free:
                return _begin(*free.pop(0), identity)  # of another kind
            lock = _lock(place)
            if lock is None:
                continue
            free.append((place, lock))
            kind = place / _KIND
            if not kind.exists() or kind.read_bytes() == identity:
                return _begin(*free.pop(), identity)
    finally:
        for _, lock in free:
            os.close(lock)
    raise AssertionError("there are always more numbers")


def _own(folder: Path) -> None:
    """Make a folder, if it is not there, and see that it is this user's alone."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=MODE, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise SettingsError(f"--disk-cache-dir: {folder} is no folder, or a symbolic link")
    if status.st_uid != os.geteuid():
        raise SettingsError(f"--disk-cache-dir: {folder} belongs to another user")
    if status.st_mode & 0o077:
        raise SettingsError(f"--disk-cache-dir: others have access to {folder}; chmod 700 it")


def _lock(place: Path) -> int | None:
    """Lock a place; None if somebody has it."""
    _own(place)
    lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock


def _begin(place: Path, lock: int, identity: bytes) -> DiskPlace:
    taken = DiskPlace(place / _BLOCKS, lock)
    try:
        _make_ready(taken.blocks, place / _KIND, identity)
    except BaseException:
        taken.release()
        raise
    return taken


def _make_ready(blocks: Path, kind: Path, identity: bytes) -> None:
    _own(blocks)
    if not kind.exists() or kind.read_bytes() != identity:
        for each in blocks.iterdir():
            each.unlink()
        kind.unlink(missing_ok=True)
        file = os.open(kind, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "wb") as out:
            out.write(identity)
