"""`pagebus complete`: where the text comes from."""

from __future__ import annotations

import io

import pytest

from pagebus.actors.commands.cli import main

TEXT = "Hello there, dear friend.\n"


@pytest.mark.parametrize(("given", "typed"), [(["A text"], ""), (["-q", "A text"], ""), ([], "A text")])
def test_a_text_is_continued(given, typed, options, server, monkeypatch, capsys) -> None:
    """From the argument or standard input; only the continuation is written."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["complete", *options, *given, "--max-tokens", "50"]) == 0
    assert capsys.readouterr().out == TEXT
    assert [request.prompt for request in server.backend.requests] == ["A text"]


def test_a_model_that_is_not_served(options, capsys) -> None:
    """The server's error, and exit code 1."""
    assert main(["complete", *options, "x", "--model-name", "nobody"]) == 1
    assert "nobody" in capsys.readouterr().err


def test_the_key_comes_from_the_environment(server, monkeypatch, capsys) -> None:
    """Where it is not given, it is the one that OpenAI's client would take."""
    monkeypatch.setenv("OPENAI_API_KEY", "test-key")
    assert main(["complete", "--base-url", server.url, "x"]) == 0
    assert capsys.readouterr().out == TEXT
