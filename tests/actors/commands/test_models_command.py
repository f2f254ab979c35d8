"""``pagebus models``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pagebus.actors.commands.cli import main
from pagebus.actors.model.families.registry import ARCHITECTURES


def test_the_table_has_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    """For people."""
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert [name for name in ARCHITECTURES if name not in printed] == []


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """For programs."""
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [name for row in rows for name in row["architectures"]] == list(ARCHITECTURES)
    assert next(row for row in rows if row["family"] == "Mixtral")["experts"] == "all layers"


def test_it_needs_no_torch() -> None:
    """Nor a model or a bus."""
    program = (
        "import sys; from pagebus.actors.commands.cli import main; main(['models']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
