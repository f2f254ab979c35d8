"""``pagebus serve`` of the shipped model as a user runs it: processes over a Redis of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from tests.helpers.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Yields its address once it answers."""
    command = [
        sys.executable,
        "-m",
        "pagebus.actors.commands.cli",
        "serve",
        "--port",
        "0",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(
        [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        list(takewhile(lambda line: "Ready after" not in line, process.stdout))
        yield process.stdout.readline().split()[-1].removesuffix("/v1/models")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)
        process.stdout.close()
