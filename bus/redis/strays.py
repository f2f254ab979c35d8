"""Finds stray entries of consumer groups: handed out once, in the stream still, and pending for nobody.

Acks delete in the same transaction, so there should be none. But a server whose append-only file ends within a
transaction keeps that part of it in the file when it starts (Redis 7.0). At its next start the part is executed, up to
the end of a later transaction: an entry that was never stored appears, or one is acked and not deleted. A reader that
dies while it takes over what another one had leaves such entries too.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagebus.bus.contract import EntryId
from pagebus.bus.redis.link import RedisLink
from pagebus.bus.redis.replies import checked, exec_results, is_no_key, pairs
from pagebus.bus.redis.stream import Reply

PAGE = 64
"""Entries that are read together, with their bodies."""
UNREAD = 512
"""The most undelivered entries that are read, with their bodies, only to count them."""


async def find_strays(link: RedisLink, stream: str, group: str) -> list[bytes]:
    """Ids of all stray entries. Pending entries that somebody has deleted without an ack hide as many, until they are
    claimed.

    Raises:
        BusUnavailable: the server cannot be asked.
    """
    (groups,) = await link.call(("XINFO", "GROUPS", stream))
    delivered = None if is_no_key(groups) else _delivered(checked(groups, f"groups of {stream}"), group)
    if delivered is None or not await _are_there_any(link, stream, group, delivered[1]):
        return []
    return await _look_through(link, stream, group, delivered[1])


async def _are_there_any(link: RedisLink, stream: str, group: str, last: bytes) -> bool:
    """Whether more is stored than is pending or unread; also if too much is unread to be counted.

    The group's lag is no measure of what is unread. A server (Redis 7.0) that starts with a file which it had rewritten
    counts what was read since then as unread.
    """
    replies = await link.call(
        ("MULTI",), ("XINFO", "GROUPS", stream), ("XLEN", stream),
        ("XRANGE", stream, f"({last.decode()}", "+", "COUNT", UNREAD), ("EXEC",),
    )  # fmt: skip
    groups, length, behind = exec_results(replies, f"counts of {stream}") or ([], 0, [])
    if (delivered := _delivered(groups, group)) is None:
        return False
    num_pending, last = delivered  # others may have read on meanwhile
    num_unread = sum(EntryId.parse(raw) > EntryId.parse(last) for raw, _ in behind)
    return bool(length > num_pending + num_unread)


async def _look_through(link: RedisLink, stream: str, group: str, last: bytes) -> list[bytes]:
    """Compare all entries up to ``last`` with the pending ones, page by page."""
    start, strays = "-", list[bytes]()
    while True:
        replies = await link.call(
            ("MULTI",), ("XRANGE", stream, start, last, "COUNT", PAGE), ("XPENDING", stream, group, start, last, PAGE),
            ("EXEC",),
        )  # fmt: skip
        stored, pending = exec_results(replies, f"stray entries of {stream}") or ([], [])
        if not stored:
            break
        seen, owned = [raw for raw, _ in stored], {row[0] for row in pending}
        if len(pending) == PAGE:  # what lies behind the last of them may be pending too
            seen = [raw for raw in seen if EntryId.parse(raw) <= EntryId.parse(pending[-1][0])]
        strays += [raw for raw in seen if raw not in owned]
        start = f"({max(map(EntryId.parse, seen or [pending[-1][0]]))}"
    return strays


def _delivered(groups: Sequence[Reply], group: str) -> tuple[int, bytes] | None:
    """(how many entries are pending, the last one that was handed out), of the reply of XINFO GROUPS."""
    rows = (row for row in map(pairs, groups) if row[b"name"] == group.encode())
    return next(((int(row[b"pending"]), row[b"last-delivered-id"]) for row in rows), None)
