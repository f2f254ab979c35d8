"""Messages as they are typed: several lines, with a history that outlives the program."""

from __future__ import annotations

import os
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class Keyboard:
    """Enter sends. Alt-Enter, or a backslash at the end of a line, begins another line; pasted lines stay together."""

    def __init__(self, history: str, commands: tuple[str, ...] = ()) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=open_history(history),
            multiline=True,
            key_bindings=bindings(),
            auto_suggest=AutoSuggestFromHistory(),
            completer=WordCompleter(list(commands), sentence=True) if commands else None,
            complete_while_typing=False,
            prompt_continuation="  ",
        )

    async def next(self) -> str | None:
        """What was typed next; None: the end (Ctrl-D). Ctrl-C begins anew."""
        while True:
            try:
                return await self._session.prompt_async("> ")
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None


def bindings() -> KeyBindings:
    """What Enter and Alt-Enter do."""
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def open_history(name: str) -> History:
    """Kept in the user's state folder, readable by the user alone; in memory where that cannot be written."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "pagebus"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / name).touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(folder / name))
