"""Finds stray entries of consumer groups: handed out once, in the stream still, and pending for nobody.

Acks delete in the same transaction, so there should be none. But a server whose append-only file ends within a
transaction keeps that part of it in the file when it starts (Redis 7.0). At its next start the part is executed, up to
the end of a later transaction: an entry that was never stored appears, or one is acked and not deleted. A reader that
dies while it takes over what another one had leaves such entries too.
"""

from __future__ import annotations

from pagebus.bus.contract import EntryId
from pagebus.bus.redis.link import RedisLink
from pagebus.bus.redis.replies import checked, exec_results, is_no_key, pairs

PAGE = 64
"""Entries that are looked at together, with their bodies."""


async def find_strays(link: RedisLink, stream: str, group: str) -> list[bytes]:
    """Ids of all stray entries.

    Raises:
        BusUnavailable: the server cannot be asked.
    """
    last = await _last_delivered(link, stream, group)
    start, strays = "-", list[bytes]()
    while last is not None:
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


async def _last_delivered(link: RedisLink, stream: str, group: str) -> bytes | None:
    (reply,) = await link.call(("XINFO", "GROUPS", stream))
    if is_no_key(reply):
        return None
    groups = map(pairs, checked(reply, f"groups of {stream}"))
    return next((each[b"last-delivered-id"] for each in groups if each[b"name"] == group.encode()), None)
