"""`pagebus top`: a deployment in the terminal, from the events that its page shows too."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console
from rich.live import Live

from pagebus.actors.commands.terminal.api import Api, ApiFailure
from pagebus.actors.commands.terminal.frame import View
from pagebus.actors.commands.terminal.stopping import until_stopped

FRAMES_PER_S = 4
AGAIN_S = 1.0
"""How long after the loss of the server it is tried again."""
WIDTH = 160
"""Columns of a frame that goes to a pipe."""


def run_top(api: Api, arguments: argparse.Namespace) -> int:
    """Show one frame, or frames until Ctrl-C; returns the exit code."""
    return asyncio.run(_once(api) if arguments.once else _live(api))


async def _once(api: Api) -> int:
    view = View()
    async with api:
        await _follow(api, view, once=True)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(view.draw())
    return 0


async def _live(api: Api) -> int:
    view, console = View(), Console()
    async with api:
        with Live(
            get_renderable=lambda: view.draw(console.height),
            console=console,
            refresh_per_second=FRAMES_PER_S,
            screen=True,
        ):
            await until_stopped(_keep_following(api, view))
    return 0


async def _keep_following(api: Api, view: View) -> None:
    """An ingress that ends is started again: the connection to it is, too. One that was never there is an error."""
    while True:
        try:
            await _follow(api, view)
            view.take("away", {"message": f"{api.root} has ended the connection"})
        except ApiFailure as error:
            if not view.version:
                raise
            view.take("away", {"message": str(error)})
        await asyncio.sleep(AGAIN_S)


async def _follow(api: Api, view: View, *, once: bool = False) -> None:
    """Take events until the server ends them; with ``once`` until there is something of everything."""
    events = api.events("GET", f"{api.root}/api/events")
    try:
        async for event in events:
            view.take(event["event"], event["data"])
            if once and view.is_whole:
                return
    finally:
        await events.aclose()
