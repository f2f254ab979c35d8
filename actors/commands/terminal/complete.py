"""`pagebus complete`: a text goes in, its continuation comes out as it is written."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from pagebus.actors.commands.terminal.api import Api
from pagebus.actors.commands.terminal.sampling import sampling_of
from pagebus.actors.commands.terminal.screen import Screen
from pagebus.actors.commands.terminal.stopping import until_stopped

STOPPED = 130
"""Exit code after Ctrl-C."""


def run_complete(api: Api, arguments: argparse.Namespace) -> int:
    """Continue one text, or each that is typed; returns the exit code."""
    return asyncio.run(_run(api, arguments))


async def _run(api: Api, arguments: argparse.Namespace) -> int:
    given = arguments.quick if arguments.prompt is None else arguments.prompt
    typed = given is None and sys.stdin.isatty()
    async with api:
        body = {"model": arguments.model_name or await api.first_model(), **sampling_of(arguments)}
        screen = Screen()
        if not typed:
            prompt = sys.stdin.read() if given is None else given
            return 0 if await until_stopped(_continue(api, body, prompt, screen)) else STOPPED
        from pagebus.actors.commands.terminal.keyboard import Keyboard

        keyboard = Keyboard("complete_history")
        while (prompt := await keyboard.next()) is not None:
            if prompt.strip() and not await until_stopped(_continue(api, body, prompt, screen)):
                screen.note("\n(stopped)")
    return 0


async def _continue(api: Api, body: dict[str, Any], prompt: str, screen: Screen) -> None:
    last = ""
    async for piece in api.complete({**body, "prompt": prompt}):
        screen.text(piece.text)
        last = piece.text or last
    if not last.endswith("\n"):
        screen.text("\n")
