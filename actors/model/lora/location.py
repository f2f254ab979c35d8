"""Where an adapter is: in a folder, or in a repository of the Hugging Face hub, which every machine fetches itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from pagebus.actors.model.config import snapshot
from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.lora.adapter import CONFIG, WEIGHTS
from pagebus.actors.model.lora.errors import NoAdapter

REPOSITORY = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.-]+))?")


class Location(NamedTuple):
    """``repository`` with its commit, by which any machine finds the same files; empty for a folder of this one."""

    folder: Path
    repository: str = ""


def locate(path: str) -> Location:
    """``path``: of a folder; else ``ORG/NAME`` or ``ORG/NAME@REVISION`` on the hub.

    Raises:
        NoAdapter: the hub has no such repository, or cannot be reached. Whether there is a folder is not looked at.
    """
    folder = Path(path).expanduser()
    match = REPOSITORY.fullmatch(path)
    if match is None or folder.exists():
        return Location(folder)
    try:
        found = snapshot(match["name"], match["revision"], (CONFIG, WEIGHTS), "adapter")
    except ModelError as error:
        raise NoAdapter(str(error)) from error
    return Location(found, f"{match['name']}@{found.name}")
