"""The table of rooms in ``docs/house.md``, made from the rooms' own docstrings: ``python -m tests.house.room_map``."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.house.imports import ROOT, sources

TOP_FLOOR_FIRST = ("web", "actors", "kernels", "bus")
PAGE = ROOT / "docs" / "house.md"
ROW = re.compile(r"^\| `[\w/]+/` \|.*\n", re.M)


def rooms() -> list[Path]:
    """The folder of every room: packages from top to bottom, by name within each."""
    return [folder for package in TOP_FLOOR_FIRST for folder in sorted({path.parent for path in sources(package)})]


def idea(folder: Path) -> str:
    """The first sentence of a room's docstring; empty without one."""
    init = folder / "__init__.py"
    told = ast.get_docstring(ast.parse(init.read_text())) if init.exists() else None
    found = re.match(r"(.+?\.)(?:\s|$)", told or "", re.S)
    return " ".join(found[1].split()).replace("``", "`") if found else ""


def rows() -> str:
    """A row for each room."""
    return "".join(f"| `{folder.relative_to(ROOT)}/` | {idea(folder)} |\n" for folder in rooms())


def main() -> None:
    """Write the rows anew, where the first of them stands."""
    text = PAGE.read_text()
    start = next(ROW.finditer(text)).start()
    rest = ROW.sub("", text)
    PAGE.write_text(rest[:start] + rows() + rest[start:])


if __name__ == "__main__":
    main()
