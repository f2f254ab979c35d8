"""Memory that other processes of the same host and user can read: an unnamed file (memfd), which they open by its
descriptor's number.

Its first page holds a random nonce. Readers compare it, so that they mistake neither another process with the same id
nor another file with the same number for it.
"""

from __future__ import annotations

import mmap
import os
import secrets

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = mmap.PAGESIZE
NONCE_BYTES = 16


class SharedMemory:
    """``num_bytes`` zeros behind a page with the ``nonce``. Pages are taken from the system when they are first used.

    Raises:
        OSError: the system has no such files.
    """

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no unnamed files (memfd)")
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.file = os.memfd_create("pagebus-kv", os.MFD_CLOEXEC)
        self._is_open = True
        os.ftruncate(self.file, HEADER_BYTES + num_bytes)
        self.map = mmap.mmap(self.file, HEADER_BYTES + num_bytes)
        self.map[:NONCE_BYTES] = self.nonce

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The zeros [num_bytes]; they stay as long as anything refers to them."""
        return np.frombuffer(self.map, np.uint8, offset=HEADER_BYTES)

    def close(self) -> None:
        """Let nobody read it any more. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.map[:NONCE_BYTES] = bytes(NONCE_BYTES)
            os.close(self.file)


def try_shared(num_bytes: int) -> SharedMemory | None:
    """Such memory, if the system has any."""
    try:
        return SharedMemory(num_bytes)
    except OSError:
        return None
