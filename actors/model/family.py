"""What a family is, beside its spec: its names in ``config.json`` and in weight files, and models to test it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import ModelSpec

TOWERS = ("model.language_model.", "language_model.model.")
"""Where the text model of a checkpoint with images lies: as transformers 5 saves it, and as the hub has it."""
IMAGES = (
    *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    *("vision_model.", "model.vision_model.", "visual.", "model.visual."),
)
EXPERT_NAMES: tuple[tuple[str, ...], ...] = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Of each expert's gate, up and down, in files that have them one by one: ours, and Mixtral's."""


@dataclass(frozen=True, slots=True)
class NameMap:
    """From the names in weight files to ours, which are those of Llama's files.

    ``prefixes`` stand for ``model.``, and tensors that begin with one of ``skip`` are not read, nor are those whose
    name, once this is done, does not begin with ``only``. ``renamed`` are parts of names inside a layer: theirs and
    ours. ``qkv`` and ``gate_up`` name what is stored as one tensor, if it is; ``qkv_by_head``: with the queries of a
    key head, then that, then its values. ``columns_first``: stacked experts are stored with inputs before outputs;
    ``gates_by_turns``: those of gate and up alternate. ``experts`` are the names of each expert's gate, up and down, as
    lists of what is quantized have them.
    """

    prefixes: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    qkv: str | None = None
    gate_up: str | None = None
    qkv_by_head: bool = False
    columns_first: bool = False
    gates_by_turns: bool = False
    experts: tuple[str, ...] = EXPERT_NAMES[0]
    only: str = ""

    def ours(self, name: str) -> str | None:
        """Our name of a stored tensor; None if it is not read."""
        if name.startswith(self.skip):
            return None
        for prefix in self.prefixes:
            if name.startswith(prefix):
                name = f"model.{name.removeprefix(prefix)}"
                break
        else:
            name = name.removeprefix("language_model.") if self.prefixes else name
        if not name.startswith(self.only):
            return None
        for theirs, mine in self.renamed:
            if theirs in name:
                return name.replace(theirs, mine)
        return name


WITH_IMAGES = NameMap(prefixes=TOWERS, skip=IMAGES)
"""Of families whose checkpoints may have an image tower."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models. ``golden`` are configurations of tiny models, as transformers' ``model_type`` takes them, by
    a name each; ``defaults`` are fields that files leave out where transformers has values of its own for them.
    ``differs`` says what is not as in Llama, for the tables of families. ``end_tokens`` end answers whatever the files
    say; ``reasoning`` is the parser of reasoning unless one is named."""

    name: str
    architectures: tuple[str, ...]
    model_type: str
    parse: Callable[[Fields], ModelSpec]
    names: NameMap = field(default_factory=NameMap)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    golden: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    differs: str = ""
    end_tokens: tuple[int, ...] = ()
    reasoning: str = ""


def without_layers(names: NameMap, first: int, count: int) -> NameMap:
    """The same, but that ``count`` layers from ``first`` on are not read: those that guess the tokens after next."""
    return replace(names, skip=(*names.skip, *(f"model.layers.{first + index}." for index in range(count))))
