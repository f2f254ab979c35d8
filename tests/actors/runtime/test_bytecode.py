"""Bytecode is kept, wherever that has to be."""

from __future__ import annotations

import os
import py_compile
import sys
from pathlib import Path

import pytest

from pagebus.actors.runtime import bytecode
from pagebus.actors.runtime.bytecode import keep_bytecode

PACKAGE = "package_without_bytecode"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of the one package that counts; Python keeps bytecode beside sources, and cannot write there."""
    (tmp_path / PACKAGE).mkdir()
    source = tmp_path / PACKAGE / "__init__.py"
    source.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bytecode, "LARGE", (PACKAGE, "package_that_is_not_there"))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name == "bytecode")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return source


def kept() -> tuple[str | None, bool, str]:
    """Where this process keeps bytecode, and whether it does not; and where its children do."""
    keep_bytecode()
    return sys.pycache_prefix, sys.dont_write_bytecode, os.environ["PYTHONPYCACHEPREFIX"]


def test_a_read_only_environment_has_a_folder_elsewhere(tmp_path: Path) -> None:
    """In the user's cache, for this process and those it starts."""
    folder = str(tmp_path / "cache" / "pagebus" / "bytecode")
    assert kept() == (folder, False, folder)
    assert Path(folder).is_dir()


def test_an_image_without_bytecode_has_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written beside its sources."""
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    folder = str(tmp_path / "cache" / "pagebus" / "bytecode")
    assert kept() == (folder, False, folder)
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ


def test_bytecode_beside_the_sources_is_used(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if none may be written."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    py_compile.compile(str(package), doraise=True)
    assert kept() == (None, True, "")


def test_it_is_written_beside_the_sources_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python does by itself."""
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert kept() == (None, False, "")


def test_a_folder_that_is_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it may be written to."""
    monkeypatch.setattr(sys, "pycache_prefix", "/given")
    assert kept() == ("/given", False, "")


def test_without_a_place_for_it_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache cannot be written, or not be made: a file is in its place."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        assert kept() == (None, False, "")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept() == (None, False, "")
