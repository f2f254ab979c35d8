"""An environment with the wheel: one name of ours in it, beside other people's ``kernels`` and what imports that."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers.public_index import why_unreachable
from tests.house.imports import NAME, PACKAGES, ROOT

OTHERS = ("kernels==0.17.2", "bitsandbytes==0.50.2")
"""The hub's library that transformers and bitsandbytes import as ``kernels``, and the latter."""
LIMIT_S = 600
USE = """
import bitsandbytes.functional as functional
import kernels
import torch

@kernels.use_kernel_forward_from_hub("Doubled")
class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x

doubled = kernels.kernelize(Doubled(), mode=kernels.Mode.INFERENCE, device="cpu")
print(doubled(torch.ones(1)).item())
print(functional.dequantize_blockwise(*functional.quantize_blockwise(torch.ones(256)))[0].item())

from pagebus import LLM, SamplingParams
from pagebus.kernels.layers.norm import rms_norm_reference

print(rms_norm_reference(torch.ones(1, 4), torch.ones(4), 0.0)[0, 0].item())
with LLM(device="cpu", threads=1, max_num_seqs=8) as llm:
    (output,) = llm.generate("word", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
print(len(output.outputs[0].token_ids))
print(kernels.__file__ != __import__("pagebus.kernels").kernels.__file__)
"""

pytestmark = [pytest.mark.timeout(LIMIT_S), pytest.mark.slow]


def run(*command: str | Path, **environ: str) -> str:
    """What a command prints; it has to succeed."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environ
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=variables, cwd=os.environ.get("TMPDIR", "/tmp")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_the_repository(folder: Path) -> Path:
    """What is to be built from, without what a build leaves behind; links stay links."""
    folder.mkdir()
    names = [name for name in (*PACKAGES, NAME, "pyproject.toml", "README.md", "LICENSE") if (ROOT / name).exists()]
    with tarfile.open(folder / "tree.tar", "w") as archive:
        for name in names:
            archive.add(ROOT / name, name, filter=lambda each: None if "__pycache__" in each.name else each)
    with tarfile.open(folder / "tree.tar") as archive:
        archive.extractall(folder, filter="fully_trusted")
    return folder


def build(folder: Path, source: Path, hook: str) -> Path:
    """A wheel or a source distribution, by setuptools as it is here."""
    script = f"import setuptools.build_meta as build; print(build.{hook}({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True, timeout=LIMIT_S)
    (built,) = folder.glob("pagebus-*.whl" if "wheel" in hook else "pagebus-*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository."""
    folder = tmp_path_factory.mktemp("wheel")
    return build(folder, copy_of_the_repository(folder / "tree"), "build_wheel")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that sees what this one has, but Pagebus."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def install(python: Path, *options: str | Path) -> None:
    """By the pip of this environment, into that one; Python compiles what it imports."""
    quick = "--quiet", "--no-deps", "--no-compile"
    run(sys.executable, "-m", "pip", "--python", python, "install", *quick, *options)


def test_a_wheel_has_one_name(wheel: Path) -> None:
    """And below it every module and every file that the packages here have."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {NAME}
    modules = {f"{NAME}/{path.relative_to(ROOT)}" for each in PACKAGES for path in (ROOT / each).rglob("*.py")}
    assert modules - names == set()
    for data in (
        "actors/shipped_model/config.json",
        "kernels/linear/tables/sm_90_132.json",
        "kernels/moe/launch/tables/sm_90_132.json",
        "web/static/index.html",
    ):
        assert f"{NAME}/{data}" in names


def test_a_source_distribution_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """It has files where the repository has links."""
    source = build(tmp_path, copy_of_the_repository(tmp_path / "tree"), "build_sdist")
    with tarfile.open(source) as archive:
        assert [each.name for each in archive if each.issym()] == []
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build(tmp_path, unpacked, "build_wheel")
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(wheel) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_beside_the_hubs_kernels(wheel: Path, python: Path, tmp_path: Path) -> None:
    """``kernels`` is the hub's, and works; so do bitsandbytes, which imports it, and a model of ours."""
    if (why := why_unreachable(tmp_path)) is not None:
        pytest.skip(f"the public package index cannot be reached: {why}")
    install(python, wheel)
    install(python, *OTHERS)

    told = run(python, "-c", USE, HF_HUB_OFFLINE="1").split()

    assert told == ["2.0", "1.0", "1.0", "3", "True"]


def test_importing_the_name_imports_nothing_else(wheel: Path, python: Path) -> None:
    """No torch, and none of the packages, until something is used; and there is a command."""
    install(python, wheel)
    script = f"import sys, {NAME}; print([name for name in ('torch', 'pagebus.actors') if name in sys.modules])"
    assert run(python, "-c", script) == "[]\n"
    assert run(python.with_name("pagebus"), "--version").startswith("pagebus ")


def test_an_editable_installation_shows_one_name(python: Path, tmp_path: Path) -> None:
    """The folders beside ``pagebus/`` are not to be imported by their own names."""
    source = copy_of_the_repository(tmp_path / "tree")
    install(python, "--no-build-isolation", "--editable", source)
    script = (
        "import pagebus.bus.codec, importlib.util\n"
        f"print(pagebus.__file__, [name for name in {PACKAGES!r} if importlib.util.find_spec(name)])"
    )
    file, _, found = run(python, "-c", script).partition(" ")
    assert Path(file) == source / NAME / "__init__.py"
    assert found.strip() in ("[]", "['kernels']")  # the hub's, where the test before has installed it
