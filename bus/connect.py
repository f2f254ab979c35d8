"""Opens the bus that a URL names."""

from __future__ import annotations

from weakref import WeakValueDictionary

from pagebus.bus.contract import Bus, BusError
from pagebus.bus.hidden_imports import hide_imports
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.streams import Names

with hide_imports("opentelemetry"):  # redis-py's own metrics
    from pagebus.bus.redis.bus import RedisBus
    from pagebus.bus.redis.url import SCHEMES

_memory_servers: WeakValueDictionary[str, MemoryServer] = WeakValueDictionary()


def open_bus(
    url: str,
    deployment: str = "pagebus",
    *,
    client_name: str = "pagebus",
    connect_timeout_s: float = 30.0,
    memory_server: MemoryServer | None = None,
) -> Bus:
    """The bus at ``url``, not yet connected (``await bus.connect()``).

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://``, ``rediss+sentinel://`` (see
            :mod:`pagebus.bus.redis.url`) or ``memory://[name]``, which lives inside this process only.
        deployment: the deployment's name, part of every key.
        client_name: how the actor appears in Redis's CLIENT LIST.
        connect_timeout_s: how long ``connect`` keeps trying.
        memory_server: what ``memory://`` connects to; None: the one that all users of that URL in this process share.

    Raises:
        BusError: the URL cannot be understood.
    """
    scheme = url.partition("://")[0]
    if scheme == "memory":
        server = memory_server if memory_server is not None else _memory_servers.setdefault(url, MemoryServer())
        return MemoryBus(server, Names(deployment))
    if scheme in SCHEMES:
        return RedisBus(url, Names(deployment), client_name=client_name, connect_timeout_s=connect_timeout_s)
    raise BusError(
        f"unknown bus URL {scheme!r:.40}: use one of {', '.join((*SCHEMES, 'memory'))}, as in redis://host:6379"
    )
