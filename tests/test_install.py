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

from tests.helpers.public_index import Package, choice_of_pip, requirements_of, resolve, why_unreachable, write_wheel

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


def loose(packages: dict[str, Package]) -> list[str]:
    """Packages that may be of another version tomorrow: no line pins them, and nobody asks for an exact one."""
    free = packages.keys() - pins().keys()
    parents = {parent for name in free for parent in packages[name].parents}
    asked = requirements_of(frozenset(f"{name}=={packages[name].version}" for name in parents)) if free else {}
    requirements = [Requirement(each) for texts in asked.values() for each in texts]
    return sorted(
        free - {canonicalize_name(each.name) for each in requirements if str(each.specifier).startswith("==")}
    )


@pytest.mark.slow
@pytest.mark.usefixtures("index")
def test_constraints_with_cuda(tmp_path: Path) -> None:
    """With the public torch, all that `make` installs goes together with NIXL, in each Python, and nothing of it is
    left to the day. NIXL brings a package for each CUDA, of its own version."""

    def answer(python: str) -> dict[str, Package]:
        folder = tmp_path / python
        folder.mkdir()
        return resolve(python, folder, ours("nixl", "otel", "test"), f"--constraint={CONSTRAINTS}")

    for packages in map(answer, PYTHONS):
        assert loose(packages) == []
        assert {"torch", "triton", "nvidia-nccl-cu13", "nixl", "nixl-cu12", "nixl-cu13"} <= packages.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("index")
def test_constraints_without_cuda(tmp_path: Path) -> None:
    """With a CPU build of torch beside the index, pip chooses it, and nothing is installed that only a GPU needs.

    The build is a stand-in with the public one's requirements but CUDA's: those of PyTorch are on an index of its own.
    What goes together in each Python is tried above, where there is more of it.
    """
    python, torch = PYTHONS[1], pins()["torch"]
    public = requirements_of(frozenset([f"torch=={torch}"]))["torch"]
    needs = [each for each in public if not each.startswith(CUDA)]
    assert needs != public
    write_wheel(tmp_path, "torch", f"{torch}+cpu", needs)

    beside = f"--find-links={tmp_path.as_uri()}", f"--constraint={CONSTRAINTS}"
    chosen = choice_of_pip(["torch"], python, tmp_path, *beside)["torch"]
    assert (chosen.version.local, chosen.requires) == ("cpu", needs)
    packages = resolve(python, tmp_path, ours("otel"), *beside)
    assert packages["torch"].version.local == "cpu"
    assert [name for name in packages if name.startswith(CUDA)] == []
    assert loose(packages) == []


@pytest.mark.slow
@pytest.mark.usefixtures("index")
def test_an_older_torch_is_kept(tmp_path: Path) -> None:
    """What has torch 2.11 and Triton 3.6 already can keep both: there is a set for `pip install .` beside them."""
    packages = resolve("3.12", tmp_path, [*ours("test"), "torch==2.11.0", "triton==3.6.0"])
    assert (str(packages["torch"].version), str(packages["triton"].version)) == ("2.11.0", "3.6.0")


@pytest.mark.parametrize(("name", "version"), [("torch", "2.11.0"), ("torch", "2.11.0+cu130"), ("triton", "3.6.0")])
def test_an_older_torch_satisfies(name: str, version: str) -> None:
    """No line of `pyproject.toml` has torch or Triton replaced where torch 2.11 is."""
    requirements = [Requirement(line) for line in ours("otel", "test")]
    found = [each.specifier for each in requirements if each.name == name]
    assert [specifier.contains(version) for specifier in found] == [True]


def test_python_is_supported() -> None:
    """The oldest Python of these tests is the oldest that `pyproject.toml` allows."""
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
