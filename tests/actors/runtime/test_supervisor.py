"""The supervisor, with small shell processes in place of actors and a memory bus to look at."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import sys
from dataclasses import replace

import pytest

from pagebus.actors.runtime.child import CRASH_LOOP, Child, Restarts
from pagebus.actors.runtime.process import EXIT_FAILED, EXIT_OK, EXIT_UNUSABLE, StopSignal
from pagebus.actors.runtime.supervisor import ChildPlan, Supervisor
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.progress import Progress
from pagebus.bus.contract import Bus, BusError
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from tests.helpers.waiting import LIMIT_S, until

DRAINS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("up", flush=True)
signal.sigwait({signal.SIGTERM})
print("drained")
"""
STUBBORN = DRAINS.replace('print("drained")', "signal.sigwait({signal.SIGUSR1})")


def plan(name: str, script: str, kind: str = "executor") -> ChildPlan:
    """A child that runs a shell script, or a Python one if it has lines."""
    python = (sys.executable, "-I", "-S", "-c", script)
    command = python if "\n" in script else ("/bin/sh", "-c", script)
    return ChildPlan(kind, name, command, dict(os.environ))


class Watched:
    """A supervisor over ``plans`` whose output can be waited for."""

    def __init__(self, *plans: ChildPlan, **settings: object) -> None:
        self.out = io.StringIO()
        self.progress = Progress(self.out, terminal=False)
        self.stop = StopSignal()
        self.ready: list[str] = []
        self.refusal: BusError | None = None
        self._changed = asyncio.Event()
        write = self.progress.line

        def line(text: str) -> None:
            write(text)
            self._changed.set()

        self.progress.line = line  # type: ignore[method-assign]
        self.bus = MemoryBus(MemoryServer())
        self.supervisor = Supervisor(
            Settings(**{"port": 1, "drain_timeout_s": 0.1} | settings),  # type: ignore[arg-type]
            self._connect,
            plans,
            self.progress,
            self.ready.extend,
        )
        self.running = asyncio.create_task(self.supervisor.run(self.stop))

    async def _connect(self) -> Bus:
        if self.refusal is None:
            return self.bus
        await self.until("up")
        raise self.refusal

    async def lease(self, kind: str, name: str, **info: object) -> None:
        """Take a lease as the process of this actor would."""
        pid = next(child.pid for child in self.supervisor.children if child.name == name)
        told = {"actor": name, "host": socket.gethostname(), "pid": pid, **info}
        await self.bus.acquire_lease(kind, name, told, ttl_s=60)

    def last_line(self) -> str:
        """What the output ends with."""
        return self.out.getvalue().splitlines()[-1]

    async def until(self, text: str, times: int = 1) -> None:
        """Wait until the output holds ``text``."""
        async with asyncio.timeout(LIMIT_S):
            while self.out.getvalue().count(text) < times:
                assert not self.running.done(), self.out.getvalue()
                self._changed.clear()
                await self._changed.wait()


async def test_drains_in_order_and_leaves_nothing() -> None:
    """On a signal the ingress goes first, then the rest; the exit code is 0."""
    watched = Watched(plan("executor-0", DRAINS), plan("ingress-0", DRAINS.replace("drained", "closed"), "ingress"))
    await watched.until("up", times=2)
    watched.stop()
    assert await watched.running == EXIT_OK
    lines = watched.out.getvalue().splitlines()
    assert [line for line in lines if line in ("closed", "drained")] == ["closed", "drained"]
    assert [child.pid for child in watched.supervisor.children] == [None, None]


async def test_a_bus_that_refuses_ends_everything() -> None:
    """With its error, once the children, which were started before it was asked, have gone."""
    watched = Watched(plan("executor-0", DRAINS))
    watched.refusal = BusError("wrong password")
    with pytest.raises(BusError, match="wrong password"):
        await watched.running
    assert "drained" in watched.out.getvalue()
    assert watched.supervisor.children[0].pid is None


async def test_kills_what_does_not_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ignores SIGTERM is killed after the drain timeout."""
    monkeypatch.setattr("pagebus.actors.runtime.supervisor.LAST_WAVE_S", 0.1)
    watched = Watched(plan("executor-0", STUBBORN))
    await watched.until("up")
    watched.stop()
    assert await watched.running == EXIT_OK
    assert watched.supervisor.children[0].pid is None


async def test_second_signal_ends_at_once() -> None:
    """Ctrl-C twice does not wait for the drain."""
    watched = Watched(plan("executor-0", STUBBORN))
    await watched.until("up")
    watched.stop()
    await asyncio.sleep(0)
    watched.stop()
    assert await watched.running == EXIT_OK


async def test_restarts_and_frees_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies is started again, and its lease is given up at once."""
    monkeypatch.setattr("pagebus.actors.runtime.child.FIRST_PAUSE_S", 0.01)
    watched = Watched(plan("executor-0", DRAINS))
    await watched.until("up")
    await watched.lease("executor", "executor-0", state="loading")
    pid = watched.supervisor.children[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await watched.until("up", times=2)
    assert await watched.bus.leases() == []
    assert watched.supervisor.children[0].pid not in (None, pid)
    watched.stop()
    assert await watched.running == EXIT_OK


async def test_one_that_was_told_to_leave_is_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as it is told: an executor ends at each /sleep, which is no crash."""
    monkeypatch.setattr("pagebus.actors.runtime.child.FIRST_PAUSE_S", 10 * LIMIT_S)
    watched = Watched(plan("executor-0", DRAINS))
    for life in range(1, CRASH_LOOP + 2):
        await watched.until("up", times=life)
        pid = watched.supervisor.children[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
    await watched.until("up", times=CRASH_LOOP + 2)
    watched.stop()
    assert await watched.running == EXIT_OK


def ranks(first: str, second: str) -> list[ChildPlan]:
    """An executor of two ranks."""
    both = plan("executor-0", first), plan("executor-0.1", second, "rank")
    return [replace(each, group="executor-0") for each in both]


@pytest.mark.parametrize("which", [0, 1])
async def test_ranks_end_and_start_together(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one dies the other is killed, and the leases of both are given up."""
    monkeypatch.setattr("pagebus.actors.runtime.child.FIRST_PAUSE_S", 0.01)
    watched = Watched(*ranks(DRAINS, STUBBORN))
    await watched.until("up", times=2)
    for kind, name in (("executor", "executor-0"), ("rank", "executor-0.1")):
        await watched.lease(kind, name, state="loading")
    before = [child.pid for child in watched.supervisor.children]
    killed = before[which]
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await watched.until("up", times=4)
    assert await watched.bus.leases() == []
    assert not {child.pid for child in watched.supervisor.children} & {None, *before}
    watched.stop()
    assert await watched.running == EXIT_OK
    assert [child.pid for child in watched.supervisor.children] == [None, None]


async def test_ranks_are_needed_until_rank_0_has_drained() -> None:
    """The drain is told to rank 0; the others end with it, and need not know how."""
    watched = Watched(*ranks(DRAINS, STUBBORN.replace("up", "rank up")))
    await watched.until("up", times=2)
    watched.stop()
    assert await watched.running == EXIT_OK
    assert "drained" in watched.out.getvalue()
    assert "it did not drain in time" not in watched.out.getvalue()
    assert [child.pid for child in watched.supervisor.children] == [None, None]


async def test_a_rank_that_cannot_work_ends_everything() -> None:
    """With its cause, not those of the ranks that were killed for it."""
    watched = Watched(*ranks(DRAINS, "echo pagebus: another model; exit 2"))
    assert await watched.running == EXIT_UNUSABLE
    assert watched.last_line() == "pagebus: another model"


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        ("echo pagebus: the very cause; exit 1", ["pagebus: executor-0 keeps dying: the very cause"]),
        (
            "echo the very cause; exit 7",
            [
                "executor-0 has ended. Its last lines:",
                "  the very cause",
                "pagebus: executor-0 keeps dying: exit code 7, for the reason in its lines above",
            ],
        ),
        (
            "echo so far; kill -9 $$",
            [
                "executor-0 has ended. Its last lines:",
                "  so far",
                "pagebus: executor-0 keeps dying: killed by signal 9, for the reason in its lines above",
            ],
        ),
    ],
)
async def test_crash_loop_at_startup_ends_with_the_cause(
    script: str, ending: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five deaths in a row while starting end everything; a process that could not say why has its last lines shown."""
    monkeypatch.setattr("pagebus.actors.runtime.child.FIRST_PAUSE_S", 0.001)
    watched = Watched(plan("executor-0", script), plan("tokenizer-0", DRAINS, "tokenizer"))
    assert await watched.running == EXIT_FAILED
    assert watched.out.getvalue().splitlines()[-len(ending) :] == ending
    assert [child.pid for child in watched.supervisor.children] == [None, None]


async def test_unusable_model_ends_at_once_with_one_sentence() -> None:
    """Exit code 2 means that a restart is useless. The sentence of the first process is said once, as the last line."""
    watched = Watched(
        plan("executor-0", "echo pagebus: no such model; exit 2"),
        plan("tokenizer-0", "echo pagebus: no such model; exit 2", "tokenizer"),
    )
    assert await watched.running == EXIT_UNUSABLE
    assert watched.out.getvalue().count("no such model") == 1
    assert watched.last_line() == "pagebus: no such model"


async def test_another_life_of_the_same_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the same names that live on elsewhere do not make ours ready, and end the start with a sentence."""
    monkeypatch.setattr("pagebus.actors.runtime.readiness.PATIENCE", 0)
    watched = Watched(plan("executor-0", DRAINS), plan("ingress-0", DRAINS, "ingress"))
    for kind in ("executor", "ingress"):
        info = {"actor": f"{kind}-0", "host": "there", "pid": 7, "state": "ready", "port": 1}
        await watched.bus.acquire_lease(kind, f"{kind}-0", info, ttl_s=60)
    assert await watched.running == EXIT_UNUSABLE
    assert watched.ready == []
    assert watched.last_line() == (
        "pagebus: executor-0 of the deployment 'pagebus' runs already, as process 7 of there: end it, or give this "
        "deployment another --name"
    )
    assert len(await watched.bus.leases()) == 2


async def test_the_lease_of_another_life_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """When one of ours dies that stood by for it."""
    monkeypatch.setattr("pagebus.actors.runtime.child.FIRST_PAUSE_S", 0.01)
    watched = Watched(plan("executor-0", DRAINS))
    await watched.until("up")
    info = {"actor": "executor-0", "host": "there", "pid": 7, "state": "ready"}
    await watched.bus.acquire_lease("executor", "executor-0", info, ttl_s=60)
    watched.supervisor.children[0].signal(signal.SIGKILL)
    await watched.until("up", times=2)
    assert [lease.info["pid"] for lease in await watched.bus.leases()] == [7]
    watched.stop()
    assert await watched.running == EXIT_OK


async def test_grandchildren_are_killed_too() -> None:
    """What a process left behind in its session ends with it."""
    watched = Watched(plan("executor-0", "sleep 600 & echo pid=$!; exit 2"))
    assert await watched.running == EXIT_UNUSABLE
    pid = int(watched.out.getvalue().partition("pid=")[2].split()[0])
    await until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_children_die_with_the_supervisor() -> None:
    """SIGKILL for the supervisor is SIGKILL for what it started."""
    code = (
        "import subprocess, time; from pagebus.actors.runtime.child import die_with_parent\n"
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=die_with_parent())\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert _runs(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not _runs(pid))


async def test_ready_once_health_answers(unused_tcp_port: int) -> None:
    """The URL is announced when the executors are ready and GET /health says 200."""
    status = b"503 no"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n")
        asked.set()
        writer.close()

    asked = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", unused_tcp_port)
    watched = Watched(plan("executor-0", DRAINS), plan("ingress-0", DRAINS, "ingress"))
    await watched.until("up", times=2)
    await watched.lease("executor", "executor-0", state="ready")
    await watched.lease("ingress", "ingress-0", port=unused_tcp_port)
    await asked.wait()
    assert watched.ready == []
    status = b"200 OK"
    await until(lambda: bool(watched.ready))
    assert watched.ready == [f"127.0.0.1:{unused_tcp_port}"]
    watched.stop()
    assert await watched.running == EXIT_OK
    server.close()
    await server.wait_closed()


async def test_long_lines_and_the_tail() -> None:
    """Output is passed on whatever its form, and only the last lines are kept."""
    lines: list[str] = []
    script = "head -c 3000000 /dev/zero | tr '\\0' x; for i in $(seq 100); do echo $i; done; printf end"
    child = Child("c", "executor", ["/bin/bash", "-c", script], os.environ, lines.append)
    assert await child.run_once() == 0
    assert lines[-2:] == ["100", "end"]
    assert sum(line.count("x") for line in lines) == 3_000_000
    assert len(child.tail) == 20


def test_pauses_between_restarts() -> None:
    """1, 2, 4 ... 30 s; none, and the count from the beginning, for a process that was ready or ran a minute."""
    now = [0.0]
    restarts = Restarts(lambda: now[0])
    pauses = []
    for _ in range(7):
        restarts.started()
        pauses.append(restarts.died())
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert restarts.looping
    restarts.started()
    now[0] = 60.0
    assert restarts.died() == 0
    assert not restarts.looping
    restarts.started()
    pauses = [restarts.died(was_ready=was_ready) for was_ready in (False, False, True, False)]
    assert pauses == [1, 2, 0, 1]


async def test_an_ingress_keeps_the_port_that_it_took() -> None:
    """With --port 0 it is started again on the port that its clients know; with a port of its own, as before."""
    for port, told in ((0, "up --port 4711"), (1, "up /bin/sh")):
        watched = Watched(plan("ingress-0", 'echo "up $0 $1"; exec sleep 60', "ingress"), port=port)
        await until(lambda watched=watched: watched.supervisor._bus is not None)
        await watched.until("up")
        await watched.lease("ingress", "ingress-0", port=4711)
        watched.supervisor.children[0].signal(signal.SIGKILL)
        await watched.until("up", times=2)
        watched.stop()
        await watched.running
        assert watched.out.getvalue().splitlines()[-1].strip() == told
