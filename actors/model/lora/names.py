"""Names of tensors in adapter files: which module of the model they belong to, and which of its matrices they are."""

from __future__ import annotations

import re
from typing import NamedTuple

from pagebus.actors.model.family import EXPERT_NAMES, NameMap
from pagebus.actors.model.lora.projections import EMBEDDING, HEAD

PREFIX = r"(?:base_model\.model\.)?"
NAME = re.compile(rf"{PREFIX}(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.(?!weight$)[\w-]+)?\.weight")
BIAS = re.compile(rf"{PREFIX}(?P<module>.+)\.lora_(?P<matrix>B)(?:\.(?!bias$)[\w-]+)?\.bias")
OF_EMBEDDING = re.compile(rf"{PREFIX}(?P<module>.+)\.lora_embedding_(?P<matrix>[AB])(?:\.[\w-]+)?")
COPY = re.compile(rf"{PREFIX}(?P<module>.+)\.base_layer\.weight")
"""Of a matrix of the model, which PEFT saves beside adapters of embedding or head."""
EXPERT = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<number>\d+)\.(?P<part>\w+)")
PARTS = dict(zip(*EXPERT_NAMES[::-1], strict=True))
"""Names of one expert's matrices in Mixtral's files, and ours."""
STACKED = re.compile(r"(?P<experts>.+\.mlp\.experts)(?:\.base_layer)?")
"""All experts' in one tensor. PEFT says by ``base_layer`` which of two it wrapped first, and nothing else."""


class Place(NamedTuple):
    """Where a matrix belongs: its ``module`` as adapters name it, and by our name (``ours``). Of one expert, its
    ``number``, and the module is named without it; of all experts in one tensor, ``stacked``."""

    module: str
    ours: str
    matrix: str
    number: int | None = None
    stacked: bool = False


def place_of(name: str, names: NameMap) -> Place | None:
    """None: it is no matrix of a module that the model's files have."""
    match = NAME.fullmatch(name) or OF_EMBEDDING.fullmatch(name) or BIAS.fullmatch(name)
    if match is None:
        return None
    module, matrix = match["module"], "bias" if match.re is BIAS else match["matrix"]
    ours = _ours(module, names)
    if (ours == EMBEDDING) != (match.re is OF_EMBEDDING):
        return None
    if (one := EXPERT.fullmatch(ours)) is not None:
        part = PARTS.get(one["part"], one["part"])
        return Place(module, f"{one['experts']}.{part}", matrix, int(one["number"]))
    if STACKED.fullmatch(ours) is not None:
        return Place(module, ours, matrix, stacked=True)
    return Place(module, ours, matrix)


def copied(name: str, names: NameMap) -> str | None:
    """The module, by our name, of whose matrix in the model this tensor is a copy: embedding or head."""
    match = COPY.fullmatch(name)
    ours = None if match is None else _ours(match["module"], names)
    return ours if ours in (EMBEDDING, HEAD) else None


def _ours(module: str, names: NameMap) -> str:
    return (names.ours(f"{module}.weight") or "").removesuffix(".weight")
