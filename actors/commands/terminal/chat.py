"""`pagebus chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pagebus.actors.commands.terminal.api import Api, ApiFailure
from pagebus.actors.commands.terminal.conversation import COMMANDS, HELP, Conversation, UsageError
from pagebus.actors.commands.terminal.sampling import sampling_of
from pagebus.actors.commands.terminal.screen import Screen
from pagebus.actors.commands.terminal.stopping import until_stopped

STOPPED = 130
"""Exit code after Ctrl-C."""


def run_chat(api: Api, arguments: argparse.Namespace) -> int:
    """Talk until the end of the input; returns the exit code."""
    return asyncio.run(_run(api, arguments))


async def _run(api: Api, arguments: argparse.Namespace) -> int:
    async with api:
        model = arguments.model_name or await api.first_model()
        talk = Conversation(model, arguments.system_prompt, sampling_of(arguments))
        chat = Chat(api, talk, Screen())
        if arguments.quick is not None:
            return await chat.ask(arguments.quick)
        typed = sys.stdin.isatty()
        if typed:
            chat.screen.note(f"{model} at {api.base_url}. /help lists commands, Ctrl-D ends.")
        code = 0
        async for message in _typed() if typed else _lines():
            try:
                code = await chat.take(message) or code
            except EOFError:
                break
            if code == STOPPED and not typed:
                return code
        return 0 if typed else code


async def _typed() -> AsyncIterator[str]:
    from pagebus.actors.commands.terminal.keyboard import Keyboard

    keyboard = Keyboard("chat_history", COMMANDS)
    while (message := await keyboard.next()) is not None:
        yield message


async def _lines() -> AsyncIterator[str]:
    """Standard input, where it is no terminal. Reading may block: nothing else is under way."""
    for line in sys.stdin:
        yield line.rstrip("\n")


class Chat:
    """Sends what the user says, and shows what the assistant does."""

    def __init__(self, api: Api, talk: Conversation, screen: Screen) -> None:
        self._api = api
        self._talk = talk
        self.screen = screen

    async def take(self, text: str) -> int:
        """A message or a command; returns an exit code.

        Raises:
            EOFError: the command to end.
        """
        if not text.strip():
            return 0
        if not text.startswith("/"):
            return await self.ask(text)
        try:
            told, again = self._talk.obey(text)
        except UsageError as error:
            print(f"{error}. {HELP}" if str(error).startswith("/") else error, file=sys.stderr)
            return 1
        if told:
            self.screen.text(told + "\n")
        return await self.ask(again) if again is not None else 0

    async def ask(self, message: str) -> int:
        """Send a message; what came of an answer that was stopped stays in the conversation."""
        answer = _Answer()
        try:
            done = await until_stopped(self._receive(self._talk.request(message), answer))
        except ApiFailure as error:
            self._end_line(answer)
            print(f"pagebus: {error}", file=sys.stderr)
            return 1
        self._end_line(answer)
        self._talk.add(message, answer.text)
        self.screen.note(answer.summary() if done else "(stopped)")
        return 0 if done else STOPPED

    async def _receive(self, body: Mapping[str, Any], answer: _Answer) -> None:
        async for piece in self._api.chat(body):
            if piece.text and answer.reasoning and not answer.text:
                self.screen.text("\n\n", dim=True)
            self.screen.text(piece.reasoning, dim=True)
            self.screen.text(piece.text)
            answer.reasoning += piece.reasoning
            answer.text += piece.text
            answer.usage = piece.usage or answer.usage
            answer.first_s = answer.first_s or time.monotonic()

    def _end_line(self, answer: _Answer) -> None:
        if not answer.text.endswith("\n"):
            self.screen.text("\n")


class _Answer:
    """What has come of an answer."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.usage: Mapping[str, Any] | None = None
        self.began_s = time.monotonic()
        self.first_s = 0.0

    def summary(self) -> str:
        """Counts and times, for people."""
        now_s = time.monotonic()
        tokens = int((self.usage or {}).get("completion_tokens") or 0)
        span_s = now_s - (self.first_s or now_s)
        rate = f", {(tokens - 1) / span_s:.0f} tokens/s" if tokens > 1 and span_s > 0 else ""
        return f"({tokens} tokens, first after {(self.first_s or now_s) - self.began_s:.2f} s{rate})"
