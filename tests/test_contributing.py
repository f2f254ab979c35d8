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


KINDS = (
    "A model family",
    "A kernel",
    "A route",
    "A metric",
    "A setting",
    "A message",
    "An actor",
    "A page view",
    "A benchmark",
)


def test_every_path_in_contributing_exists() -> None:
    """A newcomer is sent to files and folders that are there."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:\.?[\w-]+/)*[\w.-]+(?:\.(?:py|js|css|md|json|yaml|txt|toml)|/[\w-]*))`", text))
    assert {"web/app.py", "compose.yaml", "kernels/", "tests/gpu/bench", ".editorconfig"} <= named | {".editorconfig"}
    assert [path for path in sorted(named - {"origin/main"}) if not (ROOT / path).exists()] == []


def test_ten_kinds_of_change_have_their_files() -> None:
    """Each kind has a table with a test and a page among its rows."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    sections = dict(re.findall(r"^### (.+)\n\n(\|(?:.+\n)+)", text, re.M))
    assert tuple(sections) == KINDS
    for rows in sections.values():
        assert re.search(r"^\| `tests/", rows, re.M)
        assert len(re.findall(r"^\| `", rows, re.M)) >= 4


def test_every_room_of_contributing_is_a_room() -> None:
    """The short map leaves no package out."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## The rooms")[1].split("\n## ")[0]
    rooms = {room for row in re.findall(r"^\| (`.+?) \|", text, re.M) for room in re.findall(r"`([\w/]+)/`", row)}
    assert {room.split("/")[0] for room in rooms} == {"actors", "bus", "kernels", "web"}
    top = {f"actors/{path.name}" for path in (ROOT / "actors").iterdir() if (path / "__init__.py").exists()}
    assert top - rooms == {"actors/shipped_model"}
    assert [room for room in sorted(rooms) if not (ROOT / room).is_dir()] == []
