"""Blocks of the cache as files: one file per block, named after its content, each with a checksum.

The folder is the index: a file appears under its name by one rename, complete, and disappears by one unlink. So a
process may die at any moment. What a power cut, a bad disk or anybody else has changed is found by the checksum when it
is read; then the file is deleted and the block computed again.

Keys and values reveal prompts. Folders have mode 0700 and files 0600, no symbolic link is followed, and a folder of
another user is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
import zlib

from pagebus.actors.executor.memory.disk_place import DiskPlace

_MAGIC = b"pgbskv01"
_HEAD = struct.Struct("<8s16s24sQ")
"""Format, identity, the name as bytes, size of the block in bytes. The file ends with a checksum of all of it."""
_SUM = struct.Struct("<I")
_NAME = re.compile(r"[0-9a-f]{32}(?:[0-9a-f]{2})?")
_UNFINISHED = "new-"


class DiskError(Exception):
    """A file cannot be read or written, or does not hold what it should."""


class DiskFiles:
    """The files of one executor in its ``place``: blocks of ``block_bytes`` bytes, computed by what ``identity`` [16
    bytes] stands for. Any thread, but no two at a time for one name."""

    def __init__(self, place: DiskPlace, block_bytes: int, identity: bytes) -> None:
        self._place, self._identity, self._block_bytes = place, identity, block_bytes
        try:
            self._folder = os.open(place.blocks, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            place.release()
            raise
        self._file_bytes = _HEAD.size + block_bytes + _SUM.size

    def contents(self, most: int) -> list[str]:
        """The names of the newest ``most`` whole files, the one used longest ago first. Deletes everything else."""
        found: list[tuple[float, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                told = entry.stat(follow_symlinks=False)
                if _NAME.fullmatch(entry.name) and stat.S_ISREG(told.st_mode) and told.st_size == self._file_bytes:
                    found.append((told.st_mtime, entry.name))
                else:
                    self.drop(entry.name)
        found.sort()
        for _, name in found[: max(0, len(found) - most)]:
            self.drop(name)
        return [name for _, name in found[max(0, len(found) - most) :]]

    def write(self, name: str, block: memoryview) -> None:
        """Store a block.

        Raises:
            DiskError: it cannot be stored; nothing is left of it.
        """
        head = self._head(name)
        total = _SUM.pack(zlib.crc32(block, zlib.crc32(head)))
        unfinished = _UNFINISHED + name
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(unfinished, flags, 0o600, dir_fd=self._folder)
            try:
                if os.writev(file, (head, block, total)) != self._file_bytes:
                    raise OSError("the disk took only a part of it: is it full?")
            finally:
                os.close(file)
            os.rename(unfinished, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:
            self.drop(unfinished)
            raise DiskError(f"{type(error).__name__}: {error}") from error

    def read(self, name: str, block: memoryview) -> None:
        """Fill ``block`` with what is stored, and note the use.

        Raises:
            DiskError: it is not there, or is not what was written. The file is then deleted, and ``block`` may hold
                anything.
        """
        head, total = bytearray(_HEAD.size), bytearray(_SUM.size)
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
            try:
                size = os.fstat(file).st_size
                if size != self._file_bytes or os.readv(file, (head, block, total)) != size:
                    raise DiskError(f"{name} has {size} bytes, not {self._file_bytes}")
                os.utime(file)
            finally:
                os.close(file)
            if head != self._head(name):
                raise DiskError(f"{name} holds another block")
            if _SUM.unpack(total)[0] != zlib.crc32(block, zlib.crc32(head)):
                raise DiskError(f"{name}: the checksum is wrong")
        except (OSError, DiskError) as error:
            self.drop(name)
            raise error if isinstance(error, DiskError) else DiskError(str(error)) from error

    def drop(self, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def close(self) -> None:
        """Give the place back."""
        os.close(self._folder)
        self._place.release()

    def _head(self, name: str) -> bytes:
        return _HEAD.pack(_MAGIC, self._identity, bytes.fromhex(name), self._block_bytes)
