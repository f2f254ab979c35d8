"""Hashes of the blocks of prompts. A prompt that begins like a recent one is hashed only from where they differ."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from pagebus.actors.model.block_hash import HASH_BYTES, hash_blocks, hashes_to_array, root_of
from pagebus.bus.messages import Int32Array

PIECE_BLOCKS = 32
"""How many blocks are remembered, and found, together."""
MOST_TOKENS = 1 << 20
"""Tokens that are remembered: as many as a GPU's cache holds of a model of 8B, in some 6 MB."""


class HashedPrompts:
    """Remembers the hashes of pieces of prompts. A piece is looked up by the hash of all that is before it and by its
    last block; the rest of it is compared. Thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._most = max(1, MOST_TOKENS // (block_size * PIECE_BLOCKS))
        self._known: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        """Pieces and their hashes, the piece used longest ago first."""
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._known)

    def hashes(self, ids: Int32Array, salt: str | None, adapter: str) -> Int32Array:
        """The hashes of the full blocks, as :func:`hash_blocks` gives them."""
        raw, width = ids.tobytes(), 4 * self._block_size * PIECE_BLOCKS
        pieces = [raw[start : start + width] for start in range(0, len(raw) - width + 1, width)]
        found, parent = self._find(root_of(salt, adapter), pieces)
        rest = hash_blocks(ids[len(found) * PIECE_BLOCKS * self._block_size :], self._block_size, parent=parent)
        joined = b"".join(rest)
        self._note(parent, pieces[len(found) :], joined)
        return hashes_to_array([*found, joined])

    def _key(self, parent: bytes, piece: bytes) -> bytes:
        return parent + piece[-4 * self._block_size :]

    def _find(self, parent: bytes, pieces: list[bytes]) -> tuple[list[bytes], bytes]:
        """The hashes of the first pieces, as far as known, and the last of all."""
        found: list[bytes] = []
        with self._lock:
            for piece in pieces:
                known = self._known.get(key := self._key(parent, piece))
                if known is None or known[0] != piece:
                    break
                self._known.move_to_end(key)
                found.append(known[1])
                parent = known[1][-HASH_BYTES:]
        return found, parent

    def _note(self, parent: bytes, pieces: list[bytes], joined: bytes) -> None:
        """Remember pieces and their hashes."""
        width = HASH_BYTES * PIECE_BLOCKS
        with self._lock:
            for start, piece in zip(range(0, len(joined), width), pieces, strict=False):
                key, hashes = self._key(parent, piece), joined[start : start + width]
                self._known[key] = piece, hashes
                parent = hashes[-HASH_BYTES:]
            while len(self._known) > self._most:
                self._known.popitem(last=False)
