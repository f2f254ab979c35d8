"""What goes together from the public index alone: nothing of this machine's settings, wheels or packages counts.

uv resolves whole environments, in seconds of a core. pip, which users run, says what it would choose of few packages.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.helpers.waiting import LIMIT_S

CONNECTION = ("PIP_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES", "UV_HTTP_TIMEOUT")
"""Variables that say how an index is reached, and not which one."""
PLATFORM = "x86_64-manylinux_2_35"
"""Whose wheels may be taken: those for the C library of Ubuntu 22.04, and older ones."""
PATCHES = (0, 99)
"""The first and the last release of a version of Python, which markers may tell apart."""


@dataclass(frozen=True, slots=True)
class Package:
    """One package of a resolution: its version, and the names of those that asked for it."""

    version: Version
    parents: tuple[str, ...] = ()


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this environment's pip as on a machine where nothing has been set up."""
    return _run("pip", "--disable-pip-version-check", *arguments)


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    environ |= {key: os.environ[key] for key in CONNECTION if key in os.environ} | {"PIP_CONFIG_FILE": os.devnull}
    if "PIP_CERT" in os.environ:
        environ.setdefault("SSL_CERT_FILE", os.environ["PIP_CERT"])
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)


def why_unreachable(folder: Path) -> str | None:
    """Why no package can be had from the public index; None: it can."""
    done = pip("download", "--quiet", "--no-deps", "--retries", "1", "--dest", str(folder), "iniconfig")
    return done.stderr.strip().splitlines()[0] if done.returncode else None


def resolve(python: str, folder: Path, requirements: Iterable[str], *options: str) -> dict[str, Package]:
    """The packages that go together for a version of Python (``3.12``), by name. Only their metadata is read, with the
    markers of that Python's first and last release; what one of them needs more is part of the answer.

    Raises:
        AssertionError: there is no such set; the text is uv's.
    """
    wanted = folder / "requirements.txt"
    wanted.write_text("\n".join(requirements))

    def answer(patch: int) -> list[str]:
        done = _run(
            *("uv", "pip", "compile", "--quiet", "--no-config", f"--cache-dir={_kept().name}"),
            *("--only-binary=:all:", f"--python-version={python}.{patch}", f"--python-platform={PLATFORM}"),
            *("--no-header", "--annotation-style=line", str(wanted), *options),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return dict(_package(line) for patch in PATCHES for line in answer(patch))


@functools.cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    """What uv has read for one resolution, it need not read for the next: most of its time."""
    return tempfile.TemporaryDirectory(prefix="uv-")


def _package(line: str) -> tuple[str, Package]:
    """One line of uv's answer: ``name==version  # via parent, -r requirements.txt``."""
    requirement, _, via = line.partition("# via ")
    found = Requirement(requirement.strip())
    (exact,) = found.specifier
    parents = tuple(each for each in via.split(", ") if each and not each.startswith("-"))
    return canonicalize_name(found.name), Package(Version(exact.version), parents)


@functools.cache
def requirements_of(packages: frozenset[str]) -> dict[str, list[str]]:
    """What each of these (``name==version``) says that it requires: ``name[extra]>=1; marker``."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = choice_of_pip(sorted(packages), "3.12", Path(folder), "--no-deps")
    return {name: each.requires for name, each in chosen.items()}


@dataclass(frozen=True, slots=True)
class Chosen:
    """What pip would install: a version, and what it requires."""

    version: Version
    requires: list[str]


def choice_of_pip(requirements: Iterable[str], python: str, folder: Path, *options: str) -> dict[str, Chosen]:
    """What pip would install for these, by name."""
    report = folder / "report.json"
    done = pip(
        *("install", "--quiet", "--dry-run", "--ignore-installed", "--no-cache-dir", "--use-feature=fast-deps"),
        *("--only-binary=:all:", f"--python-version={python}", f"--target={folder / 'nowhere'}"),
        *(f"--report={report}", *options, *requirements),
    )
    assert done.returncode == 0, done.stderr
    return {
        canonicalize_name(item["metadata"]["name"]): Chosen(
            Version(item["metadata"]["version"]), item["metadata"].get("requires_dist", [])
        )
        for item in json.loads(report.read_text())["install"]
    }


def write_wheel(folder: Path, name: str, version: str, requires: Sequence[str]) -> None:
    """A wheel with metadata and nothing else."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {requirement}\n" for requirement in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: pagebus\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            wheel.writestr(path, text)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
