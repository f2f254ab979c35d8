"""The pages that list the families that are served: ``make models`` writes their lists anew."""

from __future__ import annotations

from pathlib import Path

from pagebus.actors.model.served import listed, markdown_table

ROOT = Path(__file__).parents[1]
FIRST, LAST = "<!-- families: `make models` writes this -->", "<!-- families end -->"


def written(page: str, text: str) -> str:
    """The ``page`` with this text between its two marks."""
    before, rest = page.split(FIRST, 1)
    return f"{before}{FIRST}\n\n{text}\n\n{LAST}{rest.split(LAST, 1)[1]}"


def pages() -> dict[Path, str]:
    """Each such page, as it should be."""
    made = {ROOT / "README.md": listed(), ROOT / "docs/models.md": markdown_table()}
    return {path: written(path.read_text(), text) for path, text in made.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
