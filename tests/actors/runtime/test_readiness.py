"""Whose leases count for a start."""

from __future__ import annotations

import socket

from pagebus.actors.runtime.readiness import Rivals, of_processes
from pagebus.bus.contract import LeaseInfo


def lease(epoch: int, **info: object) -> LeaseInfo:
    return LeaseInfo("executor", "executor-0", epoch, {"actor": "executor-0", "host": "there", "pid": 7, **info})


def test_leases_of_processes() -> None:
    """Those of this machine alone; another one may have a process of the same number."""
    here = lease(1, host=socket.gethostname())
    assert of_processes([lease(1), here], {7}) == [here]
    assert of_processes([here], {8, None}) == []


def test_who_keeps_a_lease_of_ours() -> None:
    """Not an earlier life, whose lease ends, nor one that drains, nor one of another name, nor we ourselves."""
    now = [0.0]
    rivals = Rivals({"executor-0"}, 5.0, lambda: now[0])
    assert rivals.look([lease(1), lease(2, actor="executor-1"), lease(3)], own=[lease(3)]) is None
    now[0] = 9.0
    assert rivals.look([lease(2)], own=[]) is None
    now[0] = 18.0
    assert rivals.look([lease(2, state="draining"), lease(4)], own=[]) is None
    now[0] = 29.0
    assert rivals.look([lease(2)], own=[]) is None
    now[0] = 39.5
    assert rivals.look([lease(2)], own=[]) == lease(2)
