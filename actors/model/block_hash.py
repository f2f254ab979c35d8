"""Chained hashes of full token blocks: equal hash means equal tokens from the start of the sequence, and equal salt.

Hash i is BLAKE2b (128 bit) over hash i-1 and the block's token ids (little-endian int32); before the first block stands
the root, a keyed hash of the request's ``cache_salt``, personal to its adapter if it has one. Tokenizers hash prompts,
the scheduler generated blocks.
On the bus a hash is four int32, so n hashes are one Int32Array [n * 4].
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from pagebus.bus.messages import Int32Array

HASH_BYTES = 16
INTS_PER_HASH = HASH_BYTES // 4
ROOT = b""
"""``parent`` of a sequence's first block."""

_ROOT_KEY = b"pagebus salt v1"


def hash_blocks(
    token_ids: Int32Array | Sequence[int], block_size: int, *, salt: bytes | str | None = b"", adapter: str = "",
    parent: bytes = ROOT,
) -> list[bytes]:  # fmt: skip
    """One 16-byte hash per full block of ``token_ids`` [n]; a partial last block has none.

    ``parent`` is the hash of the block before the first one; ROOT starts a sequence, and only then ``salt`` (the
    request's ``cache_salt``; None is the same as empty) and ``adapter`` (its digest, 32 hexadecimal digits) count.

    Raises:
        ValueError: ``block_size`` is below 1, or ``parent`` is neither ROOT nor a hash.
    """
    if block_size < 1:
        raise ValueError(f"block_size {block_size}: must be at least 1")
    if parent == ROOT:
        parent = root_of(salt, adapter)
    elif len(parent) != HASH_BYTES:
        raise ValueError(f"parent has {len(parent)} bytes: must be ROOT or {HASH_BYTES}")
    whole = np.ascontiguousarray(token_ids, dtype="<i4")[: len(token_ids) // block_size * block_size]
    hashes: list[bytes] = []
    fresh = blake2b(digest_size=HASH_BYTES).copy  # a copy is made sooner than another one
    for raw in whole.view(f"V{4 * block_size}").tolist():
        block = fresh()
        block.update(parent + raw)
        parent = block.digest()
        hashes.append(parent)
    return hashes


def hash_next(parent: bytes, raw: bytes) -> bytes:
    """The hash of one more full block after the one with hash ``parent``; ``raw`` holds its tokens, little-endian."""
    return blake2b(parent + raw, digest_size=HASH_BYTES).digest()


def hashes_to_array(hashes: Sequence[bytes]) -> Int32Array:
    """n hashes as the Int32Array [n * 4] that travels on the bus."""
    return np.frombuffer(b"".join(hashes), dtype="<i4").astype(np.int32, copy=False)


def hashes_from_array(array: Int32Array) -> list[bytes]:
    """The hashes in an Int32Array [n * 4].

    Raises:
        ValueError: the length is not a multiple of 4.
    """
    if len(array) % INTS_PER_HASH:
        raise ValueError(f"{len(array)} integers are no whole number of block hashes")
    hashes: list[bytes] = np.ascontiguousarray(array, dtype="<i4").view(f"V{HASH_BYTES}").tolist()
    return hashes


def root_of(salt: bytes | str | None, adapter: str) -> bytes:
    """What stands before a sequence's first block."""
    raw = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt or b""
    return blake2b(raw, digest_size=HASH_BYTES, key=_ROOT_KEY, person=bytes.fromhex(adapter)).digest()
