"""What pip would install from the public index alone: nothing of this machine's settings, wheels or packages counts."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.helpers.waiting import LIMIT_S

CONNECTION = ("PIP_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES")
"""Variables that say how pip reaches an index, and not which one."""


@dataclass(frozen=True, slots=True)
class Package:
    """One package of a resolution: its version, and what it requires (``name[extra]>=1; marker``)."""

    version: Version
    requires: tuple[str, ...]


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this environment's pip as on a machine where nothing has been set up."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_") or key in CONNECTION}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    environ = {**kept, "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)


def why_unreachable(folder: Path) -> str | None:
    """Why no package can be had from the public index; None: it can."""
    done = pip("download", "--quiet", "--no-deps", "--retries", "1", "--dest", str(folder), "iniconfig")
    return done.stderr.strip().splitlines()[0] if done.returncode else None


def resolve(python: str, folder: Path, requirements: Iterable[str], *options: str) -> dict[str, Package]:
    """The packages that pip would install for a version of Python (``3.12``), by name. It reads their metadata only.

    Raises:
        AssertionError: there is no such set; the text is pip's.
    """
    report = folder / f"report-{python}.json"
    (folder / "requirements.txt").write_text("\n".join(requirements))
    done = pip(
        *("install", "--quiet", "--dry-run", "--ignore-installed", "--no-cache-dir", "--use-feature=fast-deps"),
        *("--only-binary=:all:", f"--python-version={python}", f"--target={folder / 'nowhere'}"),
        *(f"--report={report}", f"--requirement={folder / 'requirements.txt'}", *options),
    )
    assert done.returncode == 0, done.stderr
    return {
        canonicalize_name(item["metadata"]["name"]): Package(
            Version(item["metadata"]["version"]),
            tuple(item["metadata"].get("requires_dist", ())),
        )
        for item in json.loads(report.read_text())["install"]
    }


def asked(packages: Mapping[str, Package], wanted: Iterable[str], python: str) -> list[tuple[str, Requirement]]:
    """Every requirement on Linux with this version of Python, from those ``wanted`` on, and whose it is ("": ours).

    pip itself reads markers as the Python that runs it.
    """
    found: list[tuple[str, Requirement]] = []
    todo, seen = [("", Requirement(text)) for text in wanted], set()
    while todo:
        origin, requirement = todo.pop()
        found.append((origin, requirement))
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if name in packages and (name, extra) not in seen:
                seen.add((name, extra))
                todo += [(name, each) for each in _requires(packages[name], python, extra)]
    return found


def _requires(package: Package, python: str, extra: str) -> list[Requirement]:
    """What a package, or an extra of it, requires of the first or the last patch of this version of Python."""
    machine = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    environments = [
        {**default_environment(), **machine, "python_version": python, "python_full_version": f"{python}.{patch}"}
        for patch in (0, 99)
    ]
    return [
        requirement
        for requirement in map(Requirement, package.requires)
        if requirement.marker is None
        or any(requirement.marker.evaluate({**each, "extra": extra}) for each in environments)
    ]


def unmet(
    packages: Mapping[str, Package], wanted: Iterable[str], python: str, pins: Mapping[str, Version] | None = None
) -> list[str]:
    """Requirements that neither these packages nor the pins of others meet, and whose they are."""
    versions = {**(pins or {}), **{name: package.version for name, package in packages.items()}}
    return [
        f"{origin}: {requirement}"
        for origin, requirement in asked(packages, wanted, python)
        for version in [versions.get(canonicalize_name(requirement.name))]
        if version is None or not requirement.specifier.contains(version, prereleases=True)
    ]


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
