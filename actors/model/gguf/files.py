"""Which file of a folder is the model, and what belongs to it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.gguf.header import GgufFile, read_header

SUFFIX = ".gguf"
PROJECTOR = "mmproj"
"""Marks the names of image towers, which lie beside their models."""
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
DYNAMIC = "UD-"
"""Prefix of types that keep some layers more exactly. They are chosen only by their whole names."""
TYPE = re.compile(r"[A-Za-z0-9_-]+")
"""What may follow a colon behind a folder or an id: ``Q4_K_M``."""


def is_gguf(path: Path) -> bool:
    """Whether the name is that of a GGUF file."""
    return path.suffix == SUFFIX


def split_type(name: str) -> tuple[str, str]:
    """``folder:Q4_K_M`` as its two parts, the second empty where there is none."""
    before, colon, kind = name.rpartition(":")
    return (before, kind) if colon and before and TYPE.fullmatch(kind) else (name, "")


def file_of(folder: Path, kind: str) -> Path | None:
    """The model in ``folder`` whose name ends with ``kind``, or the only one; None if there is none.

    Raises:
        ModelError: it is not clear which one.
    """
    found_here = (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*/*{SUFFIX}"))
    names = [str(each.relative_to(folder)) for each in sorted(found_here)]
    found = choose(names, kind, str(folder))
    return None if found is None else folder / found


def choose(names: Iterable[str], kind: str, where: str) -> str | None:
    """One of the files ``names``, as `file_of` chooses; of a model in several files the first."""
    models = [name for name in names if name.endswith(SUFFIX) and PROJECTOR not in name.rpartition("/")[2]]
    models = [name for name in models if (part := SPLIT.fullmatch(name)) is None or int(part[2]) == 1]
    wanted = [name for name in models if _is_of(name, kind)] if kind else models
    plain = [name for name in wanted if not _is_of(name, f"{DYNAMIC}{kind}")] if kind else []
    wanted = plain or wanted
    if len(wanted) > 1 or (models and not wanted):
        listed = ", ".join(sorted(name.rpartition("/")[2] for name in models))
        what = "several GGUF files" if not kind else f"no single GGUF file of type {kind}"
        raise ModelError(f"{where} has {what} ({listed}): name one, as {where.split(':')[0]}:TYPE")
    return wanted[0] if wanted else None


def _is_of(name: str, kind: str) -> bool:
    """Whether ``Model-Q4_K_M.gguf``, or one in a folder ``Q4_K_M``, is of the type."""
    split = SPLIT.fullmatch(name)
    before, found, after = (split[1] if split else name.removesuffix(SUFFIX)).lower().rpartition(kind.lower())
    return bool(found) and not after and (not before or before.endswith(("-", ".", "/")))


def read_file(path: Path) -> GgufFile:
    """The model in the file, or in the files of which it is the first.

    Raises:
        ModelError: a file is missing or damaged, has a tensor of another one, or is not the first.
    """
    split = SPLIT.fullmatch(str(path))
    if split is None:
        return read_header(path)
    if int(split[2]) != 1:
        start = Path(f"{split[1]}-00001-of-{split[3]}{SUFFIX}").name
        raise ModelError(f"{path} is part {int(split[2])} of a model: name the first, {start}")
    first = read_header(path)
    tensors = dict(first.tensors)
    for number in range(2, int(split[3]) + 1):
        part = Path(f"{split[1]}-{number:05}-of-{split[3]}{SUFFIX}")
        for name, tensor in read_header(part).tensors.items():
            if name in tensors:
                raise ModelError(f"tensor {name} is in both {tensors[name].file.name} and {part.name}")
            tensors[name] = tensor
    return GgufFile(path, first.metadata, tensors)
