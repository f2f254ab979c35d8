"""All actors of one machine as processes: started, watched, restarted, drained.

Children run in sessions of their own, so that Ctrl-C reaches only the supervisor, which then drains them in order:
first the ingress (no new requests; running ones are finished) and who takes jobs, then all others, last the private
Redis. A child dies with the supervisor even if that is killed (:func:`pagebus.actors.runtime.child.die_with_parent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagebus.actors.runtime.actor import describe
from pagebus.actors.runtime.child import Child, Restarts, python_path
from pagebus.actors.runtime.process import EXIT_FAILED, EXIT_OK, EXIT_UNUSABLE, StopSignal
from pagebus.actors.runtime.readiness import Rivals, of_processes, where_it_answers
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.sources import child_environment, to_args
from pagebus.actors.telemetry import logs
from pagebus.actors.telemetry.last_words import sentence
from pagebus.actors.telemetry.progress import Progress
from pagebus.bus.contract import Bus, BusError, LeaseInfo
from pagebus.bus.private_redis.server import PrivateRedis

POLL_S = 0.05
"""How often a starting deployment is looked at."""
WAVES = (("ingress", "jobs"), ("tokenizer", "scheduler", "executor", "detokenizer"))
"""Order of the drain."""
LAST_WAVE_S = 5.0
"""Least time of the second wave, even if the first took all of the drain timeout."""


class GiveUp(Exception):
    """Serving is impossible; ``code`` is the exit code, the text the cause. ``lines`` are to be shown above it."""

    def __init__(self, text: str, code: int = EXIT_FAILED, lines: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.code = code
        self.lines = tuple(lines)


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """One actor process to run. Those with the same ``group`` are started, and end, together."""

    kind: str
    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    group: str = ""


def plan_children(
    settings: Settings, bus_url: str, *, environ: Mapping[str, str], gpus: Sequence[str], cores: int, unique: str = ""
) -> list[ChildPlan]:
    """The processes to start for ``settings``. ``unique`` becomes part of the names where other machines share the bus.

    Raises:
        SettingsError: more executors, or ranks of them, than GPUs.
    """
    cuda = settings.device == "cuda" or (settings.device == "auto" and bool(gpus))
    ranks = settings.num_ranks
    if cuda and gpus and settings.executors * ranks > len(gpus):
        asked = f"--executors {settings.executors}" + (f" {settings.rank_flags}" if ranks > 1 else "")
        raise SettingsError(f"{asked}: only {len(gpus)} GPUs are visible")
    threads = settings.threads or max(1, cores // (settings.executors * ranks))
    plans = []
    for kind, index, rank in _processes(settings):
        computes = kind == "executor"
        group = f"{kind}-{unique}{index}"
        name = f"{group}.{rank}" if rank else group
        own = settings.replace(bus=bus_url, actor_name=name, threads=threads if computes else None, rank=rank)
        variables = child_environment(own, environ)
        if computes and cuda:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(index, ranks, gpus))
        variables["OMP_NUM_THREADS"] = str(threads if computes else 1)
        # -P and PYTHONPATH: this Pagebus, whatever the working directory holds.
        variables["PYTHONPATH"] = python_path(environ)
        command = _command(kind, own, known_gpu=computes and cuda and settings.gpu_lock_dir is None)
        plans.append(ChildPlan("rank" if rank else kind, name, command, variables, group))
    return plans


def gpus_of(index: int, ranks: int, gpus: Sequence[str]) -> list[str]:
    """The GPUs of an executor, all of which each of its ``ranks`` sees; a name that is there twice is one GPU."""
    own = range(index * ranks, (index + 1) * ranks)
    return list(dict.fromkeys(gpus[number] if gpus else str(number) for number in own))


def _processes(settings: Settings) -> Iterator[tuple[str, int, int]]:
    """The kind, the number among its kind, and the rank of each actor; 0 for those without ranks."""
    for kind, count in settings.counts.items():
        ranks = range(settings.num_ranks if kind == "executor" else 1)
        yield from ((kind, index, rank) for index in range(count) for rank in ranks)


def _command(kind: str, settings: Settings, *, known_gpu: bool) -> tuple[str, ...]:
    """The command that starts an actor with its own settings."""
    process = "pagebus.actors.commands.executor_process"
    module = (process,) if known_gpu else ("pagebus.actors.commands.cli", "actor", kind)
    return (sys.executable, "-P", "-m", *module, *to_args(settings))


class Supervisor:
    """Runs ``plans`` until told to stop. ``connect`` returns a connected bus, used only to read leases. It is called
    after the children have been started, because it takes time too."""

    def __init__(
        self,
        settings: Settings,
        connect: Callable[[], Awaitable[Bus]],
        plans: Iterable[ChildPlan],
        progress: Progress,
        on_ready: Callable[[list[str]], None],
        redis: PrivateRedis | None = None,
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._connect = connect
        self._bus: Bus | None = None
        self._progress = progress
        self._on_ready = on_ready
        self._log = logs.get_logger(actor="supervisor")
        self._ready = False
        self._stopping = asyncio.Event()
        self.children: list[Child] = []
        self._groups: dict[str, list[Child]] = {}
        for plan in plans:
            child = Child(plan.name, plan.kind, plan.command, plan.environ, progress.line)
            self.children.append(child)
            self._groups.setdefault(plan.group or plan.name, []).append(child)
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._has_port = settings.port != 0
        """Else each ingress takes one, and keeps it when it is started again."""

    async def run(self, stop: StopSignal) -> int:
        """Run until a signal (0), a crash loop at startup (1) or a hopeless setting (2); returns that exit code."""
        self._keepers = {
            name: asyncio.create_task(self._keep(group), name=f"keep:{name}") for name, group in self._groups.items()
        }
        announcing = asyncio.create_task(self._announce(), name="announce")
        redis = asyncio.create_task(self._keep_redis(), name="keep:redis")
        waiting = asyncio.create_task(stop.event.wait(), name="stop")
        stop.when_repeated(self.kill)
        code, ending = EXIT_OK, list[str]()
        try:
            watched = {announcing, waiting, redis, *self._keepers.values()}
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except GiveUp as error:
            code, ending = error.code, [*error.lines, sentence(str(error))]
        finally:
            for task in (announcing, waiting):
                task.cancel()
            await asyncio.gather(announcing, waiting, return_exceptions=True)
            self._progress.done()
            await self._drain()
            redis.cancel()
            await asyncio.gather(redis, return_exceptions=True)
        for line in ending:
            self._progress.line(line)
        return code

    def kill(self) -> None:
        """End all children at once (the second Ctrl-C)."""
        for child in self.children:
            child.signal(signal.SIGKILL)

    # -- children -----------------------------------------------------------------------------------------------------

    async def _keep(self, group: list[Child]) -> None:
        """Run a child, or a group that lives and dies together, and restart it whenever it ends, until the drain."""
        first = group[0]
        while not self._stopping.is_set():
            child, code = await self._run_once(group)
            if self._stopping.is_set():
                return
            were_ready = [await self._release_lease(each) for each in group]
            left = code == EXIT_OK  # as it was told, for example by /sleep: its lease is gone with it
            pause_s = first.restarts.died(was_ready=left or were_ready[0])
            self._give_up_if_hopeless(first, child, code)
            cause = {"cause": child.cause} if child.cause else {}
            log = self._log.info if left else self._log.warning
            log("process ended", process=child.name, code=code, restart_in_s=pause_s, **cause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _run_once(self, group: list[Child]) -> tuple[Child, int]:
        """Run all until one ends, then kill the others. Returns the one that ended first, and its exit code. In a drain
        the others run until the first of the group has ended, which needs them."""
        runs = {asyncio.create_task(child.run_once(), name=child.name): child for child in group}
        try:
            done, _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                await asyncio.wait([next(iter(runs))])
            ended = {runs[run]: run.result() for run in done}
            return next(
                ((child, code) for child, code in ended.items() if code == EXIT_UNUSABLE), next(iter(ended.items()))
            )
        finally:
            for run in runs:
                run.cancel()  # which kills it
            await asyncio.gather(*runs, return_exceptions=True)

    async def _keep_redis(self) -> None:
        """Restart our own Redis when it dies: its file holds everything, and the actors wait for it."""
        if self._redis is None:
            await asyncio.Event().wait()
            return
        restarts = Restarts(asyncio.get_running_loop().time)
        while True:
            restarts.started()
            code = await self._redis.wait()
            pause_s = restarts.died(was_ready=True)  # or start() would have failed
            self._log.warning("redis-server ended", code=code, restart_in_s=pause_s)
            await asyncio.sleep(pause_s)
            try:
                await self._redis.start()
            except BusError as error:
                raise GiveUp(f"the private redis-server cannot be started again: {error}") from error

    def _give_up_if_hopeless(self, first: Child, child: Child, code: int) -> None:
        """End everything if a process, of the group of ``first``, proves unable to work during startup."""
        if self._ready or not (code == EXIT_UNUSABLE or first.restarts.looping):
            return
        above = [] if child.cause else [f"{child.name} has ended. Its last lines:", *map("  {}".format, child.tail)]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        cause = child.cause or f"{how}, for the reason in its lines above"
        if code == EXIT_UNUSABLE:
            raise GiveUp(child.cause or f"{child.name} cannot work: {cause}", EXIT_UNUSABLE, above)
        raise GiveUp(f"{child.name} keeps dying: {cause}", EXIT_FAILED, above)

    async def _release_lease(self, child: Child) -> bool:
        """Give up the lease of a dead child: its process is certainly gone, so nothing need wait for the expiry.
        Returns whether it had reported to be ready."""
        was_ready = False
        if self._bus is None:
            return was_ready
        with contextlib.suppress(BusError):
            for lease in of_processes(await self._bus.leases(child.kind), {child.last_pid}):
                self._keep_port(child, lease)
                was_ready = lease.info.get("state") == "ready"
                await self._bus.release_lease(lease.kind, lease.name, lease.epoch)
        return was_ready

    def _keep_ports(self, leases: Iterable[LeaseInfo]) -> None:
        for child in self.children:
            for lease in leases:
                if lease.info.get("actor") == child.name:
                    self._keep_port(child, lease)

    def _keep_port(self, child: Child, lease: LeaseInfo) -> None:
        """Give an ingress that took a free port the same one at its restart, because clients know it."""
        kept = ["--port", str(lease.info.get("port"))]
        if child.kind == "ingress" and not self._has_port and "port" in lease.info and child.command[-2:] != kept:
            child.command += kept

    # -- readiness ----------------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Show progress until the service answers, and then that it does."""
        self._bus = await self._connect()
        names = {child.name for child in self.children}
        rivals = Rivals(names, self._settings.lease_ttl_s, asyncio.get_running_loop().time)
        while True:
            try:
                leases = await self._bus.leases()
            except BusError as error:
                self._progress.show(f"waiting for the bus ({describe(error)})")
            else:
                own = of_processes(leases, {child.pid for child in self.children})
                if rival := rivals.look(leases, own):
                    raise GiveUp(self._runs_already(rival.info), EXIT_UNUSABLE)
                if addresses := await where_it_answers(self._settings, own, self._progress):
                    self._keep_ports(own)
                    break
            await asyncio.sleep(POLL_S)
        self._ready = True
        self._progress.done()
        self._on_ready([*dict.fromkeys(f"{host}:{port}" for host, port in addresses)])  # some share a port
        await self._stopping.wait()

    def _runs_already(self, info: Mapping[str, Any]) -> str:
        return (
            f"{info.get('actor')} of the deployment {self._settings.name!r} runs already, as process {info.get('pid')} "
            f"of {info.get('host')}: end it, or give this deployment another --name"
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Stop all children in order within the drain timeout; kill the rest."""
        self._stopping.set()
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + self._settings.drain_timeout_s
        for wave in WAVES:
            children = [child for child in self.children if child.kind in wave]
            for child in children:
                if child.pid is not None:
                    with contextlib.suppress(ProcessLookupError):  # it has just died, and was not reaped yet
                        os.kill(child.pid, signal.SIGTERM)
            keepers = [self._keepers[name] for name, group in self._groups.items() if group[0].kind in wave]
            limit_s = max(deadline_s - clock(), LAST_WAVE_S)
            _, late = await asyncio.wait(keepers, timeout=limit_s) if keepers else ((), ())
            for child in children:
                if child.pid is not None:
                    self._log.warning("killed: it did not drain in time", process=child.name)
                child.signal(signal.SIGKILL)
            for task in late:
                task.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
