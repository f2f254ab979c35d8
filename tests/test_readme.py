"""The README's blocks do what they say: they are run as they stand there, but for the server's address and key.

(Those of a job are in :mod:`tests.web.jobs.test_jobs_actor`, which has a Redis.)
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagebus import LLM
from tests.helpers.waiting import LIMIT_S
from tests.test_docs import blocks

ROOT = Path(__file__).parents[1]
ADDRESS = "http://127.0.0.1:8000"


def block(language: str, having: str) -> str:
    """The README's block in a language that has this text."""
    (found,) = [body for page, body in blocks(language) if page == "README.md" and having in body]
    return found


def run(*command: str) -> str:
    """What a program prints; it has to end well and complain of nothing."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, str]]:
    """Address and key of a system with the shipped model. One key in 64 begins with a dash, and this one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_urlsafe", lambda size: "-" + "k" * size)
        llm = LLM(device="cpu", threads=1)
    with llm:
        told = llm._system.client
        yield told.url, told.api_key


def test_curl(server: tuple[str, str]) -> None:
    """The first question to the shipped model is answered."""
    url, key = server
    curl = f'curl() {{ command curl -sS -H "Authorization: Bearer {key}" "$@"; }}\n'
    answer = json.loads(run("bash", "-ec", curl + block("sh", "curl http").replace(ADDRESS, url)))
    assert answer["choices"][0]["message"]["content"].startswith("water (noun)")


def test_openai(server: tuple[str, str]) -> None:
    """The program for OpenAI's client prints an answer as it comes."""
    url, key = server
    script = block("python", "from openai import").replace(ADDRESS, url).replace('"none"', repr(key))
    assert run(sys.executable, "-c", script).startswith("brave (adjective)")


def test_command_line(server: tuple[str, str]) -> None:
    """The terminal's commands, as a shell runs them."""
    url, key = server
    told = f"--url {url}/v1 --api-key={key}"
    shell = f'pagebus() {{ {sys.executable} -m pagebus.actors.commands.cli "$1" {told} "${{@:2}}"; }}\n'
    printed = run("bash", "-ec", shell + block("sh", "pagebus chat -q"))
    assert printed.startswith("water (noun)")
    assert "executor-0" in printed


def test_python() -> None:
    """The program for `LLM` runs by itself, and ends although it closes nothing."""
    script = block("python", "from pagebus import").replace("LLM()", 'LLM(device="cpu", threads=1)')
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout.splitlines()[0].partition(":")[0]) == (0, "water (noun)")
    assert "rror" not in done.stderr
