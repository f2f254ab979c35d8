"""The README's blocks for Python and the command line do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from actors import LLM
from tests.test_docs import blocks

ROOT = Path(__file__).parents[1]


def block(language: str, having: str) -> str:
    """The README's block in a language that has this text."""
    (found,) = [body for page, body in blocks(language) if page == "README.md" and having in body]
    return found


def test_command_line() -> None:
    """The commands, as a shell runs them, against a system that is not at the default address."""
    with LLM(device="cpu", threads=1) as llm:
        told = llm._system.client
        server = f"--url {told.url}/v1 --api-key {told.api_key}"
        shell = f'pagebus() {{ {sys.executable} -m actors.cli "$1" {server} "${{@:2}}"; }}\n'
        script = shell + block("sh", "pagebus chat -q")
        done = subprocess.run(["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("water (noun)")
    assert "executor-0" in done.stdout


def test_python() -> None:
    """The program for `LLM` runs by itself, and ends although it closes nothing."""
    script = block("python", "from actors import").replace("LLM()", 'LLM(device="cpu", threads=1)')
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.splitlines()[0].partition(":")[0]) == (0, "water (noun)")
    assert "rror" not in done.stderr
