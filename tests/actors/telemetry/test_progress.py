"""What is shown while the server starts."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

from pagebus.actors.telemetry.last_words import say
from pagebus.actors.telemetry.progress import READY, Progress, ProgressStream, bar, summary


def test_bar() -> None:
    """The bar is as full as the share, and never more."""
    assert bar(0.5, 4) == "[##..]"
    assert bar(7.0, 4) == "[####]"


@pytest.mark.parametrize(
    ("infos", "shown"),
    [
        ([], ("starting actors", None)),
        ([{"state": "ready"}], ("starting actors", None)),
        (
            [{"state": "ready"}, {"state": "loading", "phase": "weights", "progress": 0.25}],
            ("weights", 0.25),
        ),
        ([{"state": "loading"}, {"state": "loading", "phase": "graphs", "progress": 0.9}], ("loading", 0.0)),
        ([{"state": "ready"}, {"state": "draining"}], (READY, 1.0)),
    ],
)
def test_summary(infos: list[dict[str, object]], shown: tuple[str, float | None]) -> None:
    """The slowest executor is what one waits for."""
    assert summary(infos, 2) == shown


def test_terminal_shows_one_line() -> None:
    """On a terminal the line is replaced, log lines go above it, and it goes away at the end."""
    out = io.StringIO()
    progress = Progress(out, terminal=True)
    progress.show("weights", 0.5)
    progress.show("weights", 0.5)
    log = ProgressStream(progress, terminal=True)
    log.write("a log ")
    log.write("line\n")
    progress.done()
    drawn = "[############............]  50%  weights"
    clear = "\r\x1b[2K"
    assert out.getvalue() == f"{clear}{drawn}{clear}a log line\n{drawn}{clear}"


def test_without_a_terminal_each_quarter_is_told() -> None:
    """Logs are not flooded."""
    out = io.StringIO()
    progress = Progress(out, terminal=False)
    progress.show("starting actors")
    for percent in range(101):
        progress.show("weights", percent / 100)
    assert out.getvalue().splitlines() == [
        "starting actors",
        "weights: 0%",
        "weights: 25%",
        "weights: 50%",
        "weights: 75%",
        "weights: 100%",
    ]


def test_counts_are_no_phases_of_their_own() -> None:
    """They are shown with the quarters: a file of a million requests has as many lines in a log as one of ten."""
    out = io.StringIO()
    progress = Progress(out, terminal=False)
    for done in range(101):
        progress.show("answered", done / 100, f"{done} of 100")
    assert out.getvalue().splitlines() == [f"answered {done} of 100: {done}%" for done in (0, 25, 50, 75, 100)]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_full_disk(tmp_path: Path, *, terminal: bool) -> None:
    """Lines that find no room are lost, and nothing else; those that come once there is room are there."""
    with open("/dev/full", "w") as full:
        progress = Progress(full, terminal=terminal)
        progress.show("weights", 0.5)
        ProgressStream(progress, terminal).write("a line\n")
        progress.done()
        with contextlib.redirect_stderr(full):
            say("a cause")
        with (tmp_path / "file").open("w") as file:
            os.dup2(file.fileno(), full.fileno())
        progress.line("room")
    assert (tmp_path / "file").read_text().endswith("room\n")
