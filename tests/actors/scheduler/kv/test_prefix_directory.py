"""Which replicas may have cached a first block."""

from __future__ import annotations

import pytest

from pagebus.actors.scheduler.kv import prefix_directory as module
from pagebus.actors.scheduler.kv.prefix_directory import PrefixDirectory


def test_replicas_that_list_a_block_are_found_and_others_are_forgotten() -> None:
    """What one says of itself counts; a block that nobody lists takes no room."""
    directory, listed = PrefixDirectory(), {("a", b"x"), ("b", b"x"), ("a", b"y")}
    for name, block_hash in sorted(listed):
        directory.add(block_hash, name)

    def lists(name: str, block_hash: bytes) -> bool:
        return (name, block_hash) in listed

    assert sorted(directory.find(b"x", lists)) == ["a", "b"]
    assert directory.find(b"z", lists) == []
    listed.remove(("a", b"x"))
    assert directory.find(b"x", lists) == ["b"]
    listed.add(("a", b"x"))
    assert directory.find(b"x", lists) == ["b"], "whoever lists a block again says so"
    listed.clear()
    assert directory.find(b"x", lists) == []
    assert len(directory) == 1


def test_what_nobody_asks_for_is_swept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are never more than twice as many as are listed, or a few."""
    monkeypatch.setattr(module, "LEAST_SWEPT", 10)
    directory, listed, most = PrefixDirectory(), set[bytes](), 0
    for number in range(1000):
        block_hash = number.to_bytes(4)
        directory.add(block_hash, "a")
        listed.add(block_hash)
        listed.discard((number - 30).to_bytes(4, signed=True))
        directory.sweep(lambda _, block_hash: block_hash in listed)
        most = max(most, len(directory))
    assert len(listed) == 30
    assert 30 <= most <= 61
