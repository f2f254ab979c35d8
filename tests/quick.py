"""Checks the rooms that changed, within a minute on two cores: style, types, and their tests. ``make quick`` runs it.

A change is what differs from where the branch left ``origin/main`` (or ``main``), and what is not committed. Types are
checked beside the tests. When the minute is over, tests that have not begun are left out, and their number is printed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PACKAGES = ("actors", "bus", "kernels", "web")
LIMIT_S = 50.0
"""No test begins later than this; the rest of the minute is for the one that runs and for starting up."""
ALWAYS = ("tests/house/test_rules.py", "tests/house/test_objects.py", "tests/test_contributing.py")
"""What any change can break, and what takes seconds."""


class Deadline:
    """A plugin of pytest that leaves out every test that would begin after ``limit_s``."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_left_out = 0
        self._clock = clock
        self._end_s = clock() + limit_s

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """True for a test that is left out: pytest then does nothing with it."""
        if self._clock() < self._end_s:
            return None
        self.num_left_out += 1
        return True


def changed_files() -> list[str]:
    """Paths that differ from the branch's base, and those that git does not know yet."""
    base = "HEAD"
    for ref in ("origin/main", "main"):
        found = _git("merge-base", "HEAD", ref)
        if found:
            base = found[0]
            break
    return [*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")]


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def files_to_run(changed: Iterable[str]) -> list[str]:
    """The test files to run: those that changed, those named after a changed file, then the others of their rooms."""
    first, then = [], []
    for name in changed:
        path = Path(name)
        if path.name.startswith("test_") and (ROOT / path).exists():
            first.append(name)
        elif path.suffix == ".md":
            then.append("tests/test_docs.py")
        elif path.parts[0] in (*PACKAGES, "tests"):
            beside = _tests_in(_room(path))
            first += [each for each in beside if Path(each).stem == f"test_{path.stem}"]
            then += beside
    return list(dict.fromkeys([*ALWAYS, *first, *then]))


def _room(path: Path) -> Path:
    """The folder with the tests of a file: the mirror of its own, or else of the nearest one above that has tests."""
    if path.parts[:2] == ("web", "static"):
        return Path("tests/browser/playground" if "chat" in path.with_suffix("").parts else "tests/browser")
    folder = path.parent if path.parts[0] == "tests" else "tests" / path.parent
    while len(folder.parts) > 1 and not _tests_in(folder):
        folder = folder.parent
    return folder


def _tests_in(folder: Path) -> list[str]:
    """Test files of one folder, without those below it, and none of the top folder."""
    found = sorted((ROOT / folder).glob("test_*.py")) if len(folder.parts) > 1 else []
    return [str(each.relative_to(ROOT)) for each in found]


def main() -> int:
    """Run everything; the exit status is 0 if nothing has failed."""
    changed = changed_files()
    types = subprocess.Popen([BIN / "mypy"], cwd=ROOT)
    failed = [
        subprocess.run([BIN / "ruff", *command, "."], cwd=ROOT, check=False).returncode
        for command in (["check", "-q"], ["format", "-q", "--check"])
    ]
    deadline = Deadline(LIMIT_S)
    chosen = files_to_run(changed)
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-m", "not gpu and not slow"]
    failed.append(int(pytest.main([*options, *chosen], plugins=[deadline])))
    failed.append(types.wait())
    print(f"{len(changed)} files changed; tests of {len(chosen)} files.")
    if deadline.num_left_out:
        print(f"The minute was over: {deadline.num_left_out} tests were NOT run. `make unit` runs all of them.")
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
