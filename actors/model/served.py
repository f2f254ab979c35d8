"""Which models are served, as a table: from the families and from what the specs of their tiny models say.

``pagebus models`` prints it; the table of docs/models.md and the list of README.md are made from it (``make models``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.model.family import Family
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import LayerSpec, ModelSpec, Moe

TINY = {
    "vocab_size": 307, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
"""What families' tiny models have unless they say otherwise."""
HEADER = ("family", "`architectures`", "what differs from Llama", "experts", "windows")
WIDTH = 120
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Served:
    """A family that is served. ``differs`` says what is not as in Llama. ``experts`` is "all layers" or "some layers",
    with "a shared one" if there is one; ``windows`` tells in how many layers tokens do not see all others, "or none"
    where a configuration says so. Both are empty where there are none."""

    family: str
    architectures: tuple[str, ...]
    differs: str
    experts: str
    windows: str


def served() -> list[Served]:
    """All families, in the order of the registry."""
    return [_served(family) for family in FAMILIES]


def as_json() -> list[dict[str, Any]]:
    """The same for ``--json``."""
    return [asdict(row) for row in served()]


def markdown_table() -> str:
    """The same as a table of Markdown, without a line break at its end."""
    rows = [HEADER, ("---",) * len(HEADER)]
    for row in served():
        names = ", ".join(f"`{name}`" for name in row.architectures)
        rows.append((row.family, names, row.differs, row.experts, row.windows))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows).replace("|  |", "| |").replace("|  |", "| |")


def listed() -> str:
    """The families' names in lines of a page."""
    lines: list[str] = []
    line = ""
    for word in ("; ".join(row.family for row in served()) + ".").split(" "):
        if len(line) + len(word) >= WIDTH:
            lines, line = [*lines, line], ""
        line = f"{line} {word}".lstrip()
    return "\n".join([*lines, line])


def _served(family: Family) -> Served:
    specs = [family.parse(Fields({**family.defaults, **TINY, **golden})) for golden in family.golden.values()]
    return Served(family.name, family.architectures, family.differs, _experts(specs), _windows(specs))


def _experts(specs: Iterable[ModelSpec]) -> str:
    feeds = [[layer.feed for layer in spec.layers] for spec in specs]
    mixtures = [feed for of_model in feeds for feed in of_model if isinstance(feed, Moe)]
    if not mixtures:
        return ""
    found = _where(feeds, lambda feed: isinstance(feed, Moe))
    return f"{found}, and a shared one" if all(feed.shared for feed in mixtures) else found


def _windows(specs: Iterable[ModelSpec]) -> str:
    layers = [spec.layers for spec in specs]
    sliding, chunks = (_where(layers, partial(_has, name)) for name in ("window", "chunk"))
    return sliding or (f"chunks in {chunks}" if chunks else "")


def _has(name: str, layer: LayerSpec) -> bool:
    return bool(getattr(layer.mixer, name))


def _where(models: Iterable[Iterable[Part]], has: Callable[[Part], bool]) -> str:
    """In which layers of the models that have it at all; empty if none does."""
    found = [[has(part) for part in parts] for parts in models]
    some = [layers for layers in found if any(layers)]
    if not some:
        return ""
    where = "all layers" if all(all(layers) for layers in some) else "some layers"
    return where if len(some) == len(found) else f"{where}, or none"
