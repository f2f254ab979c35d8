"""`pagebus chat`: what it sends, shows and remembers, and how it ends."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagebus.actors.commands.cli import main
from tests.helpers.waiting import LIMIT_S

ROOT = Path(__file__).parents[4]
ANSWER = "Hello there, dear friend."


@pytest.fixture
def say(options, monkeypatch, capsys):
    """Gives lines to the command; returns its exit code, what it wrote, and its errors."""

    def run(*lines: str, more: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        code = main(["chat", *options, *more])
        return code, *capsys.readouterr()

    return run


def sent(server) -> list[list[tuple[str, str]]]:
    """The conversations that came to the server."""
    return [[(each["role"], each["content"]) for each in request.messages] for request in server.backend.requests]


def test_a_quick_message(options, server, capsys) -> None:
    """One message, the answer alone on standard output; sampling options reach the engine."""
    more = ["--temperature", "0.5", "--max-tokens", "7", "--seed", "3", "--stop", "x", "--system-prompt", "Be brief."]
    assert main(["chat", *options, "-q", "Hi", *more]) == 0
    assert capsys.readouterr().out == ANSWER + "\n"
    assert sent(server) == [[("system", "Be brief."), ("user", "Hi")]]
    sampling = server.backend.requests[0].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed, sampling.stop) == (0.5, 7, 3, ("x",))


def test_a_conversation_is_remembered(say, server) -> None:
    """Every message goes with what was said before; commands change that."""
    code, out, _ = say("one", "Say: two", "/undo", "/system Be kind.", "/set temperature 0", "three", "/retry",
                       "/reset", "four", "/exit", "never")  # fmt: skip
    assert code == 0
    first = [("user", "one"), ("assistant", ANSWER)]
    assert sent(server) == [
        first[:1],
        [*first, ("user", "Say: two")],
        *[[("system", "Be kind."), *first, ("user", "three")]] * 2,
        [("system", "Be kind."), ("user", "four")],
    ]
    assert [request.sampling.temperature for request in server.backend.requests] == [1, 1, 0, 0, 0]
    assert "two\n" in out


def test_commands_tell(say, tmp_path) -> None:
    """The list of commands, the history, a file; what is wrong is said, and the exit code is 1."""
    file = tmp_path / "talk.json"
    code, out, _ = say("/help", "hi", "/history", f"/save {file}", "/set top-p 0.5", "/set top_p")
    assert code == 0
    assert "/reset" in out
    assert f"user: hi\nassistant: {ANSWER}\n" in out
    assert "top_p 0.5\nthe server's defaults\n" in out
    assert json.loads(file.read_text())[1] == {"role": "assistant", "content": ANSWER}
    code, _, errors = say("/nothing", "/set heat 3", "/set top_k many", "/undo", "/save", "/save /nowhere/x")
    assert code == 1
    assert "/nothing: there is no such command" in errors
    assert "heat: there is no such option" in errors
    assert "'many' is not a whole number" in errors
    assert "nothing was said yet" in errors


def test_a_refused_message_is_no_part_of_the_conversation(say, server) -> None:
    """The server's words are shown, and the next message goes on from before."""
    code, out, errors = say("/set temperature 9", "one", "/set temperature", "two")
    assert code == 1
    assert "temperature" in errors
    assert "status 400" in errors
    assert sent(server) == [[("user", "two")]]
    assert out.endswith(ANSWER + "\n")


def test_ctrl_c_stops_the_answer(options, server) -> None:
    """The server hears at once that nobody waits any more."""
    server.backend.answers = False
    command = [sys.executable, "-m", "pagebus.actors.commands.cli", "chat", *options, "-q", "Hi"]
    chat = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    server.wait(lambda: len(server.backend.requests) == 1)
    chat.send_signal(signal.SIGINT)
    out, errors = chat.communicate(timeout=LIMIT_S)
    assert (chat.returncode, out, errors) == (130, "\n", "")
    server.wait(lambda: server.backend.aborts == [server.backend.requests[0].request_id])


def test_a_server_that_is_not_there(capsys) -> None:
    """One line says so."""
    assert main(["chat", "-q", "Hi", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert capsys.readouterr().err == "pagebus: there is no server at http://127.0.0.1:9/v1 (Connection refused)\n"


def test_a_wrong_key(server, capsys) -> None:
    """The server's refusal is shown."""
    assert main(["chat", "-q", "Hi", "--url", server.url, "--api-key", "wrong"]) == 1
    assert "status 401" in capsys.readouterr().err
