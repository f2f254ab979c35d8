"""A named shape with dummy weights, served over Redis as ``pagebus serve`` does, for measurements."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pagebus.actors.bench.driver.deployment import Deployment, as_served, deployed, scratch
from pagebus.actors.settings.sources import add_arguments, load_settings

LIMITS = ("--max-num-seqs", "256", "--max-model-len", "8192", "--no-enable-prefix-caching")


@asynccontextmanager
async def served(shape: str, options: Sequence[str] = ()) -> AsyncIterator[Deployment]:
    """A deployment of ``shape`` with options of ``serve``, which go before ``LIMITS``."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, model=False)
    settings = load_settings(parser.parse_args([*LIMITS, *options])).replace(model=shape)
    with scratch() as folder:
        async with deployed(as_served(settings, folder), folder / "serve.log") as deployment:
            yield deployment


@asynccontextmanager
async def recorded(deployment: Deployment, out: Path | None) -> AsyncIterator[None]:
    """``pagebus record`` of what happens in this block; nothing if ``out`` is None."""
    if out is None:
        yield
        return
    source = ["--bus", deployment.bus_url, "--name", "bench"]
    command = [sys.executable, "-m", "pagebus.actors.commands.cli", "record", *source, "--out", str(out)]
    process = await asyncio.create_subprocess_exec(*command)
    await asyncio.sleep(2)
    yield
    await asyncio.sleep(1)
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.wait(), 20)
