"""The README's blocks for Python and the command line do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.test_docs import blocks

ROOT = Path(__file__).parents[1]


def block(language: str, having: str) -> str:
    """The README's block in a language that has this text."""
    (found,) = [body for page, body in blocks(language) if page == "README.md" and having in body]
    return found


def test_python() -> None:
    """The program for `LLM` runs by itself, and ends although it closes nothing."""
    script = block("python", "from actors import").replace("LLM()", 'LLM(device="cpu", threads=1)')
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.splitlines()[0].partition(":")[0]) == (0, "water (noun)")
    assert "rror" not in done.stderr
