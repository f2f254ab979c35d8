"""A program in a fork of a process that has Triton imported is what it is in a process of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.kernels.warm import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform")
PROGRAM = """
import os, sys
print(__name__, sys.argv[1:], os.environ.get("TOLD"), "TRITON_INTERPRET" in os.environ, sys.stdin.read() == "")
print("as an error", file=sys.stderr)
sys.modules["pagebus"].left_over = True
"""


def test_arguments_environment_and_outputs(tmp_path: Path) -> None:
    """Without the interpreter; and the next one finds nothing of it."""
    script = tmp_path / "script.py"
    script.write_text("import pagebus\nassert not hasattr(pagebus, 'left_over')\n" + PROGRAM)
    for told, seen in (({"TOLD": "so"}, "so"), ({}, "None")):
        done = run([str(script), "a", "b c"], **told)
        assert (done.stderr, done.returncode) == ("as an error\n", 0)
        assert done.stdout == f"__main__ ['a', 'b c'] {seen} False True\n"


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [("sys.exit()", 0, ""), ("sys.exit(3)", 3, ""), ("raise OSError('bad')", 1, "OSError: bad"),
     ("os.kill(os.getpid(), 9)", -9, "")],
)  # fmt: skip
def test_how_it_ends(end: str, code: int, error: str, tmp_path: Path) -> None:
    """By itself, by an exception, or by a signal."""
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\n{end}\n")
    done = run([str(script)])
    assert done.returncode == code
    assert error in done.stderr
