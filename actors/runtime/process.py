"""Runs one actor as a process: its class, name, bus, signals and exit code."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import uvloop

from pagebus.actors.runtime.actor import Actor, describe
from pagebus.actors.runtime.gc_tuning import keep_what_is_there
from pagebus.actors.runtime.gpus import list_gpus, take_free_gpus
from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.telemetry import logs
from pagebus.actors.telemetry.last_words import say
from pagebus.bus.contract import Bus, BusError
from pagebus.bus.hidden_imports import hide_imports

CLASSES = {
    "ingress": ("pagebus.web.app", "IngressActor"),
    "jobs": ("pagebus.web.jobs.actor", "JobsActor"),
    "tokenizer": ("pagebus.actors.tokenizer.actor", "TokenizerActor"),
    "scheduler": ("pagebus.actors.scheduler.actor", "SchedulerActor"),
    "executor": ("pagebus.actors.executor.actor", "ExecutorActor"),
    "detokenizer": ("pagebus.actors.detokenizer.actor", "DetokenizerActor"),
}
RANKS = "pagebus.actors.executor.rank_actors"
"""Where the executors are whose model is divided."""
EXIT_OK, EXIT_FAILED, EXIT_UNUSABLE = 0, 1, 2
"""Exit codes: drained; died; cannot work with these settings or this model, so a restart is useless."""
EXIT_STOPPED = 130
"""Exit code of a command that a signal has stopped before its work was done."""

OPEN_REDIS = (
    "the URL has no password: whoever reaches it could read and change every request. Give it one "
    "(redis://user:password@host, or --redis-password), or say --allow-open-redis if the network keeps others away"
)


def actor_class(kind: str, settings: Settings | None = None) -> type[Actor]:
    """The class of a kind of actor, with these settings. Imports only that actor's package, so that the scheduler
    starts without torch."""
    module, name = CLASSES[kind]
    if kind == "executor" and settings is not None and settings.num_ranks > 1:
        module, name = RANKS, "FollowingRank" if settings.rank else "LeadingRank"
    return cast("type[Actor]", getattr(importlib.import_module(module), name))


def default_name(kind: str) -> str:
    """``executor-hostname-123``: unique among all machines on the bus."""
    host = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in socket.gethostname())
    return f"{kind}-{host}-{os.getpid()}"


def make_bus(settings: Settings) -> Bus:
    """The bus object for ``settings.bus``, not yet connected.

    Raises:
        SettingsError: there is no URL, it is invalid, a file for TLS cannot be used, or the server is open to everyone.
    """
    from pagebus.bus.connect import open_bus
    from pagebus.bus.redis.tls import check_tls_files
    from pagebus.bus.redis.url import SCHEMES, is_open, parse_redis_url, with_password, with_tls_files

    if settings.bus is None:
        raise SettingsError("--bus is needed: the URL of the bus that all actors share (or PAGEBUS_BUS)")
    files = {"ca": settings.redis_ca_file, "cert": settings.redis_cert_file, "key": settings.redis_key_file}
    try:
        url = with_password(with_tls_files(settings.bus, **files), settings.redis_password)
        if url.partition("://")[0] in SCHEMES:
            target = parse_redis_url(url)
            check_tls_files(target.options)
            if is_open(target) and not settings.allow_open_redis:
                raise BusError(f"{target.text} is on another machine, and {OPEN_REDIS}")
        return open_bus(url, settings.name, client_name=settings.actor_name or "pagebus")
    except BusError as error:
        raise SettingsError(f"--bus: {error}") from error


def choose_gpu(settings: Settings) -> None:
    """With ``--gpu-lock-dir``: take a GPU that no other executor of this machine has, and make only that visible to
    torch.

    Raises:
        RuntimeError: all are taken; a restart later may find one.
    """
    if settings.gpu_lock_dir is None or settings.device == "cpu":
        return
    if settings.num_ranks > 1:
        raise SettingsError(
            "--gpu-lock-dir: ranks that are started one by one cannot share locks; give each the GPUs of all ranks in "
            "CUDA_VISIBLE_DEVICES, or let `pagebus serve` start them"
        )
    uuids = list_gpus(uuids=True)
    chosen = take_free_gpus(Path(settings.gpu_lock_dir), uuids)
    if not chosen and uuids:
        raise RuntimeError(f"all {len(uuids)} GPUs of this machine are taken by other executors")
    if chosen:
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen[0]


def run_actor(kind: str, settings: Settings) -> int:
    """Run one actor until it ends; returns the exit code."""
    logs.configure(settings.log_level, settings.log_format)
    with (
        _without_needless(kind),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        code = runner.run(_life(kind, settings))
        if kind == "executor" and settings.num_ranks > 1 and settings.device != "cpu":
            leave_at_once(code)
        return code


def leave_at_once(code: int) -> None:
    """End a rank on a GPU here: taking down what ranks have in common may wait for one that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def _without_needless(kind: str) -> Iterator[None]:
    """Hide packages that are not needed: transformers imports torch for a tokenizer too if it is there, which takes
    longer than the rest of a start; torch imports pynvml for unused figures."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it is not there
    with hide_imports("pynvml" if kind == "executor" else "torch"):
        yield


async def _life(kind: str, settings: Settings) -> int:
    log = logs.get_logger(actor=settings.actor_name or kind)
    if settings.bus is not None and settings.bus.startswith("memory:"):
        raise SettingsError("--bus memory:// lives inside one process: use it with `pagebus serve`")
    bus = make_bus(settings)
    try:
        with stop_on_signals() as stop:
            if kind == "executor":
                choose_gpu(settings)
            # Before the bus answers: what takes long to import can begin meanwhile.
            actor = actor_class(kind, settings)(settings, bus, settings.actor_name or default_name(kind))
            actor.when_ready(keep_what_is_there)
            log = actor.log
            if not await unless_stopped(stop, bus.connect()):
                return EXIT_OK
            stop.then(actor.request_drain)
            await actor.run()
        return EXIT_OK
    except Exception as error:
        code = exit_code(error, log)
        say(cause_of(error))
        return code
    finally:
        with contextlib.suppress(BusError):
            await bus.close()


def exit_code(error: BaseException, log: logs.Log) -> int:
    """The exit code for the error that ended an actor, with a line in the log."""
    if _is_unusable(error):
        log.error("cannot start", error=str(error))
        return EXIT_UNUSABLE
    if isinstance(error, BusError):
        log.error("ended by the bus", error=describe(error))
    else:
        log.error("ended by an error", exc_info=error)
    return EXIT_FAILED


def cause_of(error: BaseException) -> str:
    """What to say of the error that ended an actor: its text, where that was written for people."""
    return str(error) if _is_unusable(error) or isinstance(error, BusError) else describe(error)


def _is_unusable(error: BaseException) -> bool:
    unusable: tuple[type[BaseException], ...] = (SettingsError, ImportError)
    for module, name in (
        ("pagebus.actors.model.config", "ModelError"),
        ("pagebus.actors.model.tokenizer", "TokenizerError"),
    ):
        if module in sys.modules:  # what was never imported cannot have raised
            unusable = (*unusable, getattr(sys.modules[module], name))
    return isinstance(error, unusable)


class StopSignal:
    """Handles SIGTERM and SIGINT: the first requests a drain, the second ends the process at once."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._repeated: Callable[[], object] = lambda: os._exit(EXIT_FAILED)
        self._actions: list[Callable[[], None]] = []

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` at the first signal, or now if it has arrived."""
        self._actions.append(action)
        if self.event.is_set():
            action()

    def when_repeated(self, action: Callable[[], object]) -> None:
        """Call ``action`` at the second signal instead of ending the process."""
        self._repeated = action

    def __call__(self) -> None:
        if self.event.is_set():
            self._repeated()
            return
        self.event.set()
        for action in self._actions:
            action()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Install a :class:`StopSignal` on the running loop."""
    loop, stop = asyncio.get_running_loop(), StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def unless_stopped(stop: StopSignal, coro: Coroutine[Any, Any, object]) -> bool:
    """Run ``coro``; cancel it and return False when a signal comes first."""
    task, waiter = asyncio.create_task(coro), asyncio.create_task(stop.event.wait())
    try:
        await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        await task
        return True
    finally:
        for each in (task, waiter):
            each.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)
