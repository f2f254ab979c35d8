"""Programs that compile kernels, each in a process of its own that has torch and Triton imported when it begins.

A new process takes seconds of a core for that. One is started by the first test that needs it, without Triton's
interpreter, and forks for every program; it has launched and compiled nothing.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
IMPORTED = ("triton.experimental.gluon", "pagebus.actors.executor.engine", "pagebus.kernels.attention.paged_attention")


def run(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` says of ``python`` with these: ``-m`` and a module, or a script; then its arguments."""
    server = _server()
    assert server.stdin
    assert server.stdout
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        told = {**_environment(), **environment}
        server.stdin.write(json.dumps([list(arguments), told, *map(str, outputs)]) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(list(arguments), code, *(path.read_text() for path in outputs))


def _environment() -> dict[str, str]:
    """This process's, without the interpreter."""
    return {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The one of this process, with which it ends."""
    command = [sys.executable, "-m", __name__]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment()
    )

    def end() -> None:
        server.communicate()

    atexit.register(end)
    return server


def _serve() -> None:
    """Run what each line of the standard input says, and answer with its exit code."""
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("triton.runtime.cache").triton_key()  # of all of Triton's files, kept for the children
    gc.freeze()  # so that children do not copy what nobody changes
    for line in sys.stdin:
        arguments, environment, out, err = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(arguments, environment, out, err)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(arguments: list[str], environment: dict[str, str], out: str, err: str) -> NoReturn:
    """Be ``python`` with these arguments, and end."""
    code = 1
    try:
        for target, path in enumerate((os.devnull, out, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), target)
        os.environ.clear()
        os.environ.update(environment)
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
