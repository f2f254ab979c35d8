"""What is typed, key by key, and what a terminal is shown."""

from __future__ import annotations

import io

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from pagebus.actors.commands.terminal.keyboard import Keyboard, open_history
from pagebus.actors.commands.terminal.screen import Screen

CTRL_C, CTRL_D, ESCAPE = "\x03", "\x04", "\x1b"


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        ("one\rtwo\r", ["one", "two"]),
        ("one\\\rtwo\r", ["one\ntwo"]),
        (f"one{ESCAPE}\rtwo\r", ["one\ntwo"]),
        ("\x1b[200~one\ntwo\x1b[201~\r", ["one\ntwo"]),
        (f"not this{CTRL_C}one\r", ["one"]),
    ],
)
async def test_lines(keys: str, messages: list[str], tmp_path, monkeypatch) -> None:
    """Enter sends, a backslash, Alt-Enter and pasting make several lines, Ctrl-C drops what was typed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        keyboard.send_text(keys + CTRL_D)
        typing = Keyboard("history")
        assert [await typing.next() for _ in messages] == messages
        assert await typing.next() is None


async def test_the_history_outlives_the_program(tmp_path, monkeypatch) -> None:
    """In a file that is the user's alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        keyboard.send_text("one\rtwo\r")
        typing = Keyboard("history")
        assert [await typing.next(), await typing.next()] == ["one", "two"]
    assert list(open_history("history").load_history_strings()) == ["two", "one"]
    assert (tmp_path / "pagebus/history").stat().st_mode & 0o777 == 0o600


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_model_does_not_command_the_terminal() -> None:
    """Control characters are replaced in a terminal, and left alone in a pipe."""
    text = "a\x1b]0;title\x07\n\tb"
    for out, shown in ((Terminal(), "a\ufffd]0;title\ufffd\n\tb"), (io.StringIO(), text)):
        Screen(out).text(text)
        assert out.getvalue() == shown
