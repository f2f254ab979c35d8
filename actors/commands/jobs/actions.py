"""The actions of `pagebus job`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from pagebus.actors.commands.jobs.transfer import OUTCOMES, ResultsMissing, batch_of, collect, submit
from pagebus.actors.runtime.process import EXIT_FAILED, EXIT_OK, make_bus
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.last_words import say
from pagebus.actors.telemetry.progress import Progress
from pagebus.bus.contract import COUNTERS_KEPT_S, Bus, BusError
from pagebus.bus.streams import Names


def act(arguments: argparse.Namespace, settings: Settings) -> int:
    """Do what the command says; returns the exit code."""
    try:
        return asyncio.run(_act(arguments, settings))
    except (BusError, ResultsMissing) as error:
        say(error)
        return EXIT_FAILED


async def _act(arguments: argparse.Namespace, settings: Settings) -> int:
    actions: dict[str, Callable[[argparse.Namespace, Bus, Names, str], Awaitable[int]]] = {
        "submit": _submit, "status": _status, "results": _results, "cancel": _cancel
    }  # fmt: skip
    bus, names = make_bus(settings), Names(settings.name)
    try:
        await bus.connect()
        return await actions[arguments.action](arguments, bus, names, arguments.batch or batch_of(arguments.file))
    finally:
        await bus.close()


async def _submit(arguments: argparse.Namespace, bus: Bus, names: Names, batch: str) -> int:
    progress = Progress(sys.stderr, terminal=sys.stderr.isatty())
    total = await submit(bus, names, arguments.file, batch, progress.show, priority=arguments.priority)
    progress.done()
    print(json.dumps({"batch": batch, "submitted": total}))
    return EXIT_OK


async def _status(arguments: argparse.Namespace, bus: Bus, names: Names, batch: str) -> int:
    (counters,) = await bus.counters(names.batch(batch))
    print(json.dumps(told(batch, counters)))
    return EXIT_OK if _is_known(arguments, batch, counters) else EXIT_FAILED


async def _results(arguments: argparse.Namespace, bus: Bus, names: Names, batch: str) -> int:
    (counters,) = await bus.counters(names.batch(batch))
    if not _is_known(arguments, batch, counters):  # would be waited for without end
        return EXIT_FAILED
    progress = Progress(sys.stderr, terminal=sys.stderr.isatty())
    output = arguments.output_file or arguments.file.with_suffix(".results.jsonl")
    counters = await collect(bus, names, batch, output, progress.show, wait=not arguments.no_wait)
    progress.done()
    print(json.dumps({**told(batch, counters), "results": str(output)}))
    return EXIT_OK


async def _cancel(arguments: argparse.Namespace, bus: Bus, names: Names, batch: str) -> int:
    (counters,) = await bus.counters(names.batch(batch))
    if _is_known(arguments, batch, counters):  # else all that is submitted later would be cancelled
        await bus.count({names.batch(batch): {"cancel": 1}}, ttl_s=COUNTERS_KEPT_S)
    return await _status(arguments, bus, names, batch) if counters else EXIT_FAILED


def _is_known(arguments: argparse.Namespace, batch: str, counters: dict[str, int]) -> bool:
    """Whether anything of the batch was submitted; if not, that is said."""
    if not counters:
        say(f"nothing of {arguments.file} has been submitted as {batch}, or its results were collected long ago")
    return bool(counters)


def told(batch: str, counters: dict[str, int]) -> dict[str, Any]:
    """A batch, for people and programs."""
    submitted = counters.get("submitted", 0)
    ended = {name: counters.get(name, 0) for name in OUTCOMES}
    return {"batch": batch, "submitted": submitted, **ended, "waiting": max(0, submitted - sum(ended.values()))}
