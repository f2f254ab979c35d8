"""Everybody can install: `constraints.txt` and `pyproject.toml` can be met from the public index alone.

No wheel is downloaded, only metadata. Without a connection to the index these tests are skipped, and say so.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.helpers.public_index import Package, asked, resolve, unmet, why_unreachable, write_wheel

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PYTHONS = ("3.11", "3.12", "3.13")
CUDA = ("cuda", "nvidia", "triton")
"""How the names of packages begin that only a GPU needs."""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The public index, or a reason to skip."""
    why = why_unreachable(tmp_path_factory.mktemp("index"))
    if why is not None:
        pytest.skip(f"the public package index cannot be reached, so nobody knows whether Pagebus installs: {why}")


def ours(*extras: str) -> list[str]:
    """What `pip install .[extras]` asks for."""
    own = [each for extra in extras for each in EXTRAS[extra] if not each.startswith("pagebus[")]
    return [*PROJECT["dependencies"], *own]


def pins() -> dict[str, Version]:
    """The versions in `constraints.txt`."""
    found = [Requirement(line) for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(each.name): Version(str(each.specifier).removeprefix("==")) for each in found}


def loose(packages: dict[str, Package], wanted: list[str], python: str) -> list[str]:
    """Packages that may be of another version tomorrow: no line pins them, and nobody asks for an exact one."""
    requirements = [requirement for _, requirement in asked(packages, wanted, python)]
    exact = {canonicalize_name(each.name) for each in requirements if str(each.specifier).startswith("==")}
    return sorted(packages.keys() - pins().keys() - exact)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.usefixtures("index")
def test_nixl_is_pinned(python: str, tmp_path: Path) -> None:
    """It brings a package for each CUDA, of its own version, and wants nothing that Pagebus has not."""
    packages = resolve(python, tmp_path, ours("nixl"), f"--constraint={CONSTRAINTS}")
    assert unmet(packages, ours("nixl"), python, pins()) == []
    assert loose(packages, ours("nixl"), python) == []
    assert {"nixl", "nixl-cu12", "nixl-cu13"} <= packages.keys()


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.usefixtures("index")
def test_constraints_with_cuda(python: str, tmp_path: Path) -> None:
    """With the public torch, all that `make` installs goes together, and nothing of it is left to the day."""
    wanted = ours("otel", "test")
    packages = resolve(python, tmp_path, wanted, f"--constraint={CONSTRAINTS}")
    assert unmet(packages, wanted, python, pins()) == []
    assert loose(packages, wanted, python) == []
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= packages.keys()


@pytest.mark.usefixtures("index")
def test_constraints_without_cuda(tmp_path: Path) -> None:
    """With a CPU build of torch beside the index, pip chooses it, and installs nothing that only a GPU needs.

    The build is a stand-in with the public one's requirements but CUDA's: those of PyTorch are on an index of its own.
    What goes together in each Python is tried above, where there is more of it.
    """
    python = PYTHONS[1]
    (public,) = resolve(python, tmp_path, [f"torch=={pins()['torch']}"], "--no-deps").values()
    needs = [each for each in public.requires if not each.startswith(CUDA)]
    assert needs != list(public.requires)
    write_wheel(tmp_path, "torch", f"{pins()['torch']}+cpu", needs)

    beside = f"--find-links={tmp_path.as_uri()}"
    packages = resolve(python, tmp_path, ours("otel"), f"--constraint={CONSTRAINTS}", beside)
    assert packages["torch"].version.local == "cpu"
    assert [name for name in packages if name.startswith(CUDA)] == []
    assert unmet(packages, ours("otel"), python, pins()) == []
    assert loose(packages, ours("otel"), python) == []


@pytest.mark.usefixtures("index")
def test_an_older_torch_is_kept(tmp_path: Path) -> None:
    """What has torch 2.11 and Triton 3.6 already can keep both: `pip install .` beside them finds a set."""
    wanted = [*ours("test"), "torch==2.11.0", "triton==3.6.0"]
    packages = resolve("3.12", tmp_path, wanted)
    assert unmet(packages, wanted, "3.12") == []


@pytest.mark.parametrize(("name", "version"), [("torch", "2.11.0"), ("torch", "2.11.0+cu130"), ("triton", "3.6.0")])
def test_an_older_torch_satisfies(name: str, version: str) -> None:
    """No line of `pyproject.toml` has torch or Triton replaced where torch 2.11 is."""
    requirements = [Requirement(line) for line in ours("otel", "test")]
    found = [each.specifier for each in requirements if each.name == name]
    assert [specifier.contains(version) for specifier in found] == [True]


def test_python_is_supported() -> None:
    """The oldest Python of these tests is the oldest that `pyproject.toml` allows."""
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
