"""Names by which the server may be called, and DNS rebinding: a page whose name resolves to this machine."""

from __future__ import annotations

import socket

import pytest

from pagebus.actors.settings import Settings, SettingsError
from pagebus.web.access.auth import ApiKey, KeyRing
from pagebus.web.access.hosts import Hosts

EVIL = "rebound.evil.example"
COMMON = (
    "localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "192.168.1.20:8000", "[::1]:8000", "[fe80::1]",
    "ingress:8000", "gpu-box", "gpu-box.local:8000", "pagebus.default.svc.cluster.local", "llm.internal",
    "me.localhost:8000", f"{socket.gethostname()}:8000", "",
)  # fmt: skip
PUBLIC = (EVIL, f"{EVIL}:8000", f"{EVIL}.", "127.0.0.1.nip.io", "localhost.evil.example", "[evil.example]")


async def ask(http, served, host, path="/v1/models", method="GET"):
    async with http.request(method, served.url + path, headers={"Host": host}) as response:
        return response.status, await response.json()


def refused(hosts: Hosts, host: str) -> bool:
    return hosts.checked and not hosts._is_known(host)


@pytest.mark.parametrize("host", COMMON)
def test_usual_names(host):
    """Addresses, this machine's name, containers, computers nearby: called so as ever."""
    assert not refused(Hosts((), "127.0.0.1", KeyRing()), host)


@pytest.mark.parametrize("host", PUBLIC)
def test_public_names(host):
    """What a page on the web can be called is refused, unless it is allowed."""
    assert refused(Hosts((), "127.0.0.1", KeyRing()), host)
    assert refused(Hosts(("other.example",), "127.0.0.1", KeyRing()), host)
    assert not refused(Hosts(("*",), "127.0.0.1", KeyRing()), host)
    assert refused(Hosts((EVIL.upper(),), "127.0.0.1", KeyRing()), host) == (EVIL not in host)


@pytest.mark.parametrize(
    ("names", "listens", "key", "checked"),
    [((), "127.0.0.1", False, True), ((), "localhost", False, True), ((), "::1", False, True),
     ((), "127.0.0.1", True, False), ((), "0.0.0.0", False, False), ((), "", False, False),
     (("a.example",), "0.0.0.0", False, True), (("a.example",), "127.0.0.1", True, True),
     (("*",), "127.0.0.1", False, False)],
)  # fmt: skip
def test_when_names_matter(names, listens, key, checked):
    """Without keys, where only this machine can call; and wherever names were given."""
    keys = KeyRing(("some-secret",) if key else ())

    assert Hosts(names, listens, keys).checked == checked


def test_keys_that_come_and_go():
    """What the file of keys says now is what counts."""
    keys = KeyRing()
    hosts = Hosts((), "127.0.0.1", keys)
    keys.replace([ApiKey("alice", b"0")])
    assert not hosts.checked
    keys.replace([])
    assert hosts.checked


async def test_a_rebound_page(serve, http):
    """It reads nothing and starts nothing, on any route; who calls the server by its address does."""
    served = await serve()

    for method, path in (("GET", "/"), ("GET", "/metrics"), ("GET", "/api/history"), ("POST", "/v1/completions"),
                         ("GET", "/nothing"), ("OPTIONS", "/v1/completions")):  # fmt: skip
        status, told = await ask(http, served, f"{EVIL}:8000", path, method)
        assert (status, told["error"]["reason"], told["error"]["type"]) == (403, "host", "PermissionDeniedError")
        assert "--allowed-hosts" in told["error"]["message"]
        assert EVIL in told["error"]["message"]
    assert served.backend.requests == []
    assert (await ask(http, served, "127.0.0.1"))[0] == 200


async def test_allowed(serve, http):
    """A name that the operator knows."""
    served = await serve(allowed_hosts=("llm.example.org",))

    assert (await ask(http, served, "llm.example.org:443"))[0] == 200
    assert (await ask(http, served, "other.example.org"))[0] == 403


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"api_key": ("k",)}, False),
                                                 ({"allowed_hosts": ("localhost",)}, False)])  # fmt: skip
async def test_open_to_the_network(serve, lines, options, warned):
    """Without keys anybody there may use it, and pages that are open there: the log says so."""
    await serve(host="0.0.0.0", **options)

    assert any(line["event"] == "open to the network: no API keys" for line in lines()) == warned


@pytest.mark.parametrize("name", ["llm.example.org:8000", "https://llm.example.org", "a b", "", "*.example.org"])
def test_bad_names(name):
    """What could never match is refused at the start."""
    with pytest.raises(SettingsError, match="allowed-hosts"):
        Settings(allowed_hosts=(name,))
