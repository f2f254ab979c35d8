"""Pulls between two hosts with a link of a given rate. ``make slow-links`` runs what needs a quiet minute."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.model_factory import make_model
from tests.system.cache.bench_links import SHAPE, started
from tests.system.network_hosts import NetworkHosts, why_not

ASKED = os.environ.get("PAGEBUS_TEST_SLOW_LINKS") == "1"
ROUNDS, TOKENS = 7, 1024
FAR, NOMINAL = (0.125, 0.5, 2.0, 8.0), (1000.0, 10000.0)
BYTES = 2 << 20
SEND = """
import socket
with socket.create_server(("198.18.0.2", 5000)) as server:
    while True:
        with server.accept()[0] as sock:
            sock.sendall(bytes(int(sock.recv(100))))
"""
RECEIVE = """
import contextlib, socket, sys, time
sock, left = None, int(sys.argv[1])
while sock is None:
    with contextlib.suppress(ConnectionRefusedError):
        sock = socket.create_connection(("198.18.0.2", 5000))
with sock:
    began_s = time.monotonic()
    sock.sendall(sys.argv[1].encode())
    while left:
        left -= len(sock.recv(left))
print(time.monotonic() - began_s)
"""


@pytest.fixture(scope="module")
def namespaces() -> None:
    """A system that makes network namespaces, or a reason to skip."""
    if (why := why_not()) is not None:
        pytest.skip(f"no slow link was tried: {why}")


def test_a_link_has_its_rate(namespaces: None) -> None:
    """Bytes take no less time than they need at the rate; and nothing is left behind."""
    took_s = {}
    with NetworkHosts(2) as network:
        sender, receiver = network.hosts
        with sender.running(sys.executable, "-c", SEND):
            for megabits_per_s in (20.0, 200.0):
                network.limit(megabits_per_s)
                took_s[megabits_per_s] = float(receiver.run(sys.executable, "-c", RECEIVE, str(BYTES)))
        pids = [host.pid for host in network.hosts]
    assert all(seconds >= 0.9 * BYTES * 8 / (rate * 1e6) for rate, seconds in took_s.items())
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.skipif(not ASKED, reason="`make slow-links` runs this: it measures times")
async def test_the_better_way_is_chosen(namespaces: None, tmp_path: Path) -> None:
    """Far from break-even and at 1 and 10 Gb/s: within 5% of the better of pulling and computing."""
    model = make_model(tmp_path / "model", "llama2", seed=1, **SHAPE)
    async with started(model, tmp_path, TOKENS) as links:
        cases = [await links.case(factor * links.even_megabits_per_s(), ROUNDS) for factor in FAR]
        cases += [await links.case(rate, ROUNDS) for rate in NOMINAL]
    assert [case.line() for case in cases if not case.is_right] == []
    assert [any(case.pulled) for case in cases[: len(FAR)]] == [False, False, True, True]
