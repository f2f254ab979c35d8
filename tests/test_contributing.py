"""What CONTRIBUTING.md and docs/dependencies.md say about the code is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
MOST_FILES = 5


def test_a_sampling_parameter_takes_few_files() -> None:
    """The files of the worked example are all that name the parameter."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Where does a new sampling parameter go?") :].split("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w/.]+)` \|", section, re.MULTILINE))
    naming = {
        str(path.relative_to(ROOT))
        for folder in ("actors", "bus", "kernels", "web")
        for path in (ROOT / folder).rglob("*.py")
        if "logprob_token_ids" in path.read_text()
    }
    assert listed == naming
    assert len(naming) <= MOST_FILES


def test_every_dependency_has_a_reason() -> None:
    """The first table of docs/dependencies.md names what pyproject.toml does, and no more."""
    text = (ROOT / "docs" / "dependencies.md").read_text()
    section = text[text.index("## What is installed") :].split("\n## ")[0]
    explained = re.findall(r"^\| `([\w-]+)` \| .+ \|$", section, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert explained == sorted(Requirement(each).name for each in project["dependencies"])
