"""Shapes of Redis replies (RESP2, as hiredis parses them) and the meaning of their errors, all in one place."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from pagebus.bus.codec import entry_of
from pagebus.bus.contract import BusError, BusRefused, Entry, EntryId

_TRANSIENT = ("MISCONF", "OOM", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ", "NOREPLICAS")
_FORBIDDEN = ("NOPERM", "NOAUTH", "WRONGPASS")
_REMEDIES = (
    ("MISCONF", "Redis cannot write its data to disk: check its disk and log"),
    ("OOM", "Redis has reached maxmemory: give it more memory, with maxmemory-policy noeviction"),
    ("READONLY", "this Redis is a replica, or a failover is under way"),
    ("LOADING", "Redis is still loading its data"),
)


def error_of(error: ResponseError, what: str) -> BusError:
    """The exception for an error reply to ``what``: :class:`BusRefused` where waiting may help."""
    text = str(error).removeprefix("ERR ")
    if text.startswith(_TRANSIENT):
        remedy = next((remedy for code, remedy in _REMEDIES if text.startswith(code)), "")
        return BusRefused(f"{what}: {text}" + (f" ({remedy})" if remedy else ""))
    if text.startswith(_FORBIDDEN):
        return BusError(f"{what}: Redis does not permit it ({text}): check the user's ACL")
    return BusError(f"{what}: {text}")


def checked(reply: Any, what: str) -> Any:
    """The reply itself.

    Raises:
        BusRefused: an error reply that may pass (out of memory, read only, loading).
        BusError: any other error reply.
    """
    if isinstance(reply, ResponseError):
        raise error_of(reply, what)
    return reply


def refusal(reply: Any, what: str) -> str:
    """Why a command is refused for good; "" if it is not.

    Raises:
        BusRefused: it may pass.
    """
    try:
        checked(reply, what)
    except BusRefused:
        raise
    except BusError as error:
        return str(error)
    return ""


def exec_results(replies: list[Any], what: str) -> list[Any] | None:
    """The results of a MULTI ... EXEC whose replies end with EXEC's; None if a watched key had changed."""
    for reply in replies:
        checked(reply, what)
    results = replies[-1]
    if results is None:
        return None
    return [checked(result, what) for result in results]


def is_read_only(reply: Any) -> bool:
    """Whether the server is a replica, or has become one."""
    return isinstance(reply, ResponseError) and str(reply).startswith("READONLY")


def is_no_group(reply: Any) -> bool:
    """Whether the stream or the group does not exist, or has gone while a read waited for its entries."""
    return isinstance(reply, ResponseError) and (
        str(reply).startswith(("NOGROUP", "UNBLOCKED")) or "requires the key to exist" in str(reply)
    )


def is_no_key(reply: Any) -> bool:
    """Whether the key does not exist (XINFO)."""
    return isinstance(reply, ResponseError) and "no such key" in str(reply).lower()


def is_wrong_type(reply: Any) -> bool:
    """Whether the key has a value of another type than the command is for."""
    return isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE")


def is_group_exists(reply: Any) -> bool:
    """Whether XGROUP CREATE found the group there."""
    return isinstance(reply, ResponseError) and "BUSYGROUP" in str(reply)


def is_refused_id(reply: Any) -> bool:
    """Whether XADD refused an explicit id because the stream already has an equal or larger one."""
    return isinstance(reply, ResponseError) and "equal or smaller" in str(reply)


def pairs(flat: list[Any]) -> dict[bytes, Any]:
    """A flat [key, value, key, value] list as a dict."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def stream_parts(reply: Any) -> list[tuple[str, list[tuple[bytes, list[bytes] | None]]]]:
    """XREAD and XREADGROUP: [(stream, [(id, flat fields or None if deleted)])]; empty on timeout."""
    if reply is None:
        return []
    return [(name.decode(), [(item[0], item[1]) for item in items]) for name, items in reply]


def to_entry(stream: str, raw_id: bytes, flat: list[bytes], deliveries: int = 1) -> Entry:
    """The entry of one stream item."""
    return entry_of(stream, EntryId.parse(raw_id), pairs(flat), deliveries)
