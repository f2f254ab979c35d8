"""Checks the ``Host`` header: the remedy against DNS rebinding.

A page on the web can make its own name resolve to 127.0.0.1 a moment after it was loaded. The browser then takes the
server for the origin of the page, so checks of the origin do not help. The browser still sends the page's name in
``Host``. An IP address, or a name that public DNS cannot have, is never the name of such a page.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address

from aiohttp import web

from pagebus.actors.settings import Settings
from pagebus.web.access.auth import KeyRing
from pagebus.web.http.errors import ApiError

PRIVATE = (".localhost", ".local", ".internal", ".home.arpa")
"""Ends of names that are for private networks (RFC 6761, 6762 and 8375; ``.internal`` by ICANN)."""
MAX_SHOWN = 253
"""Characters of a name, which is what DNS allows."""


class Hosts:
    """``names``: those allowed besides addresses and private names, ``*`` for any. If there are none, it depends:
    whoever ``listens`` on this machine only is called by such names, and needs the check unless it has keys; names in a
    network are not known here."""

    def __init__(self, names: Sequence[str], listens: str, keys: KeyRing) -> None:
        own = {socket.gethostname().lower(), listens.lower(), *(name.lower() for name in names)}
        self._keys = keys
        self._always = bool(names) and "*" not in names
        self._without_keys = not names and is_address_of_this_machine(listens)
        self._is_known = lru_cache(256)(lambda host: is_private(host) or name_of(host) in own)

    @property
    def checked(self) -> bool:
        """Whether anything is refused, as things are now."""
        return self._always or (self._without_keys and self._keys.is_empty)

    def check(self, request: web.Request) -> None:
        """Refuse a request that calls the server by an unknown name.

        Raises:
            ApiError: 403.
        """
        if self.checked and not self._is_known(host := request.headers.get("Host", "")):
            name = name_of(host)[:MAX_SHOWN]
            text = f"This server does not answer to the name {name!r}: allow it by --allowed-hosts, or set --api-key."
            raise ApiError(403, text, code="host")


def open_hosts(settings: Settings, keys: KeyRing) -> Hosts:
    return Hosts(settings.allowed_hosts, settings.host, keys)


def name_of(host: str) -> str:
    """A ``Host`` header without port and brackets, in small letters."""
    name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
    return name.lower().removesuffix(".")


def is_private(host: str) -> bool:
    """Whether no page on the web can have come from what a ``Host`` header names: an address, this machine, a name
    without a dot (as of a container or a computer nearby) or for private networks; or nothing, which browsers never
    say."""
    name = name_of(host)
    return "." not in name or name.endswith(PRIVATE) or _is_address(name)


def is_address_of_this_machine(listens: str) -> bool:
    """Whether ``--host`` is reached from this machine only."""
    return listens == "localhost" or (_is_address(listens) and ip_address(listens).is_loopback)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
