"""A named shape with dummy weights, served over Redis as ``pagebus serve`` does, for measurements."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from actors.bench.deployment import Deployment, as_served, deployed, scratch
from actors.settings.sources import add_arguments, load_settings

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
