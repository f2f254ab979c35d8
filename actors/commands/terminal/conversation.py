"""The conversation of `pagebus chat`, and the commands that change it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from pagebus.actors.commands.terminal.sampling import parse_field
from pagebus.actors.settings import SettingsError

Message = dict[str, str]
HELP = "/help lists commands"
TEXTS = {
    "/help": "this list",
    "/reset": "forget the conversation (also /clear)",
    "/system": "TEXT: the system prompt from now on; without TEXT: none",
    "/set": "NAME VALUE: a sampling option, such as temperature; without VALUE: the server's default",
    "/retry": "answer the last message again",
    "/undo": "forget the last message and its answer",
    "/history": "the conversation so far",
    "/save": "FILE: write the conversation as JSON",
    "/exit": "end (also /quit, Ctrl-D)",
}
COMMANDS = tuple(TEXTS)
KEYS = "Enter sends; Alt-Enter or \\ at the end of a line begins another line; Ctrl-C stops an answer."


class UsageError(ValueError):
    """A command that cannot be obeyed; the text says why."""


class Conversation:
    """A system prompt, messages, and how they are to be answered."""

    def __init__(self, model: str, system: str | None, sampling: Mapping[str, Any]) -> None:
        self.model = model
        self.system = system
        self.sampling = dict(sampling)
        self.messages: list[Message] = []

    @property
    def all_messages(self) -> list[Message]:
        """With the system prompt."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]

    def request(self, message: str) -> dict[str, Any]:
        """The body that asks for an answer to ``message``."""
        asked = {"role": "user", "content": message}
        return {"model": self.model, "messages": [*self.all_messages, asked], **self.sampling}

    def add(self, message: str, answer: str) -> None:
        """Something was said and answered."""
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]

    def undo(self) -> str:
        """Forget the last message and its answer; returns the message."""
        if not self.messages:
            raise UsageError("nothing was said yet")
        message = self.messages[-2]["content"]
        del self.messages[-2:]
        return message

    def obey(self, line: str) -> tuple[str, str | None]:
        """What a command has to tell, and a message to send again.

        Raises:
            UsageError: the command is not known, or what it was given makes no sense.
            EOFError: the command to end.
        """
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help":
                return "\n".join(f"{name:9} {text}" for name, text in TEXTS.items()) + f"\n{KEYS}", None
            case "/reset" | "/clear":
                self.messages.clear()
                return "forgotten", None
            case "/system":
                self.system = rest or None
                return f"system prompt: {self.system or 'none'}", None
            case "/set":
                return self._set(rest), None
            case "/retry":
                return "", self.undo()
            case "/undo":
                self.undo()
                return "forgotten: the last message and its answer", None
            case "/history":
                return "\n".join(f"{each['role']}: {each['content']}" for each in self.all_messages), None
            case "/save":
                return self._save(rest), None
            case "/exit" | "/quit":
                raise EOFError
        raise UsageError(f"{name}: there is no such command")

    def _set(self, rest: str) -> str:
        name, _, value = rest.partition(" ")
        name = name.replace("-", "_")
        if name and value:
            try:
                parsed = parse_field(name, value.strip())
            except SettingsError as error:
                raise UsageError(str(error)) from None
            self.sampling[name] = parsed
        elif name:
            self.sampling.pop(name, None)
        return ", ".join(f"{name} {value}" for name, value in self.sampling.items()) or "the server's defaults"

    def _save(self, file: str) -> str:
        if not file:
            raise UsageError("/save needs the name of a file")
        try:
            Path(file).write_bytes(orjson.dumps(self.all_messages, option=orjson.OPT_INDENT_2) + b"\n")
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
        return f"written to {file}"
