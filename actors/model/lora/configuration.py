"""``adapter_config.json`` of PEFT: the scale of each module, and what is refused because it would be computed wrongly.

Names and defaults are those of ``peft.LoraConfig``. A field that is not known here is refused if it is set, for it may
change what the matrices mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from pagebus.actors.model.lora.errors import AdapterError

USED = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
IGNORED = {
    "peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode",
    "auto_mapping", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "init_lora_weights", "runtime_config", "bias", "qalora_group_size", "megatron_core", "loftq_config",
    "eva_config", "lora_ga_config", "corda_config", "ensure_weight_tying", "target_parameters",
    "lora_bias",
}  # fmt: skip
"""Fields that say how the adapter was trained, that the tensors' names say better, or that are looked at apart."""
REFUSED = {
    "use_dora": "the magnitudes of DoRA are not served",
    "modules_to_save": "whole matrices in place of the model's are not served",
    "trainable_token_indices": "embeddings of adapters are not served",
    "fan_in_fan_out": "transposed matrices are not served",
    "layer_replication": "repeated layers are not served",
    "use_qalora": "QALoRA is not served",
    "alora_invocation_tokens": "activated LoRA is not served",
    "megatron_config": "layers of Megatron are not served",
    "arrow_config": "routed adapters are not served",
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to initialise that change the model's own weights, as long as the adapter is not converted."""
CORRECTED = (0, 19, 1)
"""PEFT's version from which on A reads the inputs of experts in one tensor, whichever way the model stores them."""
BIASES = ("none", "all", "lora_only")
"""Which of the model's biases were trained: if it had any, they are in the file, and refused there."""
TASKS = (None, "CAUSAL_LM")
MOST_PATTERNS, MOST_WILDCARDS = 4096, 3
PATTERN = re.compile(r"(?:[\w$^-]|\\\.|(?:\.|\\d|\[0-9\])[*+]?)+")
WILDCARD = re.compile(r"[*+]")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and scales: of all modules, and of those that a pattern names."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    by_root: bool
    """Alpha is divided by the root of the rank (rsLoRA, Kalajdzievski, 2023), not by the rank."""
    tied: bool = False
    """The head has the embedding's adapter, if the model has one matrix for both."""
    corrected: bool | None = None
    """Of experts in one tensor: whether PEFT knew that weights have outputs before inputs; None: it does not say."""

    def rank_of(self, module: str) -> int:
        """The rank of a module, by the name that the model's files have for it."""
        return self.ranks.get(_pattern_of(self.ranks, module), self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """By what B A x is multiplied in a module of this rank."""
        alpha = self.alphas.get(_pattern_of(self.alphas, module), self.alpha)
        return alpha / math.sqrt(rank) if self.by_root else alpha / rank

    @property
    def ranks_told(self) -> tuple[Hashable, ...]:
        """All of it but scales: what says, with a file's header, which matrices there are."""
        return self.rank, tuple(self.ranks.items()), self.tied, self.corrected

    def canonical(self) -> dict[str, object]:
        """What of it changes the outputs."""
        patterns = {"ranks": dict(sorted(self.ranks.items())), "alphas": dict(sorted(self.alphas.items()))}
        told: dict[str, object] = {"rank": self.rank, "alpha": self.alpha, "by_root": self.by_root, **patterns}
        order = [[*self.ranks], [*self.alphas]]
        if order != [sorted(each) for each in order]:
            told["order"] = order  # the first pattern that matches counts
        return told if self.corrected is None else told | {"corrected": self.corrected}


def parse_config(fields: object) -> AdapterConfig:
    """The configuration in a parsed ``adapter_config.json``.

    Raises:
        AdapterError: it is broken, or asks for what is not served; the text names the field.
    """
    if not isinstance(fields, dict):
        raise AdapterError("adapter_config.json: must be an object")
    if fields.get("peft_type") != "LORA":
        raise AdapterError(f"adapter_config.json: peft_type is {_shown(fields.get('peft_type'))}, only LORA is served")
    _refuse(fields)
    rank, alpha = _rank("r", fields.get("r", 8)), _alpha("lora_alpha", fields.get("lora_alpha", 8))
    ranks = {key: _rank(f"rank_pattern[{key!r}]", value) for key, value in _patterns(fields, "rank_pattern").items()}
    alphas = {key: _alpha(f"alpha_pattern[{key!r}]", each) for key, each in _patterns(fields, "alpha_pattern").items()}
    corrected = _corrected(fields) if fields.get("target_parameters") else None
    return AdapterConfig(
        rank, alpha, ranks, alphas, _switch(fields, "use_rslora"), bool(fields.get("ensure_weight_tying")), corrected
    )


def _refuse(fields: Mapping[str, Any]) -> None:
    for name, why in REFUSED.items():
        if fields.get(name):
            raise AdapterError(f"adapter_config.json: {name}: {why}")
    if (bias := fields.get("bias", "none")) not in BIASES:
        raise AdapterError(f"adapter_config.json: bias is {_shown(bias)}, none of {', '.join(BIASES)}")
    if (task := fields.get("task_type")) not in TASKS:
        raise AdapterError(f"adapter_config.json: task_type is {_shown(task)}, only CAUSAL_LM is served")
    way = fields.get("init_lora_weights", True)
    if isinstance(way, str) and way.lower().startswith(CHANGES_BASE):
        text = "convert the adapter (path_initial_model_for_weight_conversion), for it belongs to a changed model"
        raise AdapterError(f"adapter_config.json: init_lora_weights is {_shown(way)}: {text}")
    for name, value in fields.items():
        if value and name not in USED and name not in IGNORED:
            raise AdapterError(f"adapter_config.json: {_shown(name)}: unknown field")


def _patterns(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name) or {}
    if not isinstance(found, dict) or len(found) > MOST_PATTERNS:
        raise AdapterError(f"adapter_config.json: {name}: must be an object of at most {MOST_PATTERNS} patterns")
    for key in found:
        if PATTERN.fullmatch(key) is None or len(WILDCARD.findall(key)) > MOST_WILDCARDS:
            text = f"{_shown(key)} is no name of a module with at most {MOST_WILDCARDS} wildcards (.*, \\d+)"
            raise AdapterError(f"adapter_config.json: {name}: {text}")
    return found


def _pattern_of(patterns: Mapping[str, object], module: str) -> str:
    """As PEFT chooses: the first that the end of the module's name matches."""
    for key in patterns:
        if re.match(rf"(.*\.)?({key})$", module):
            return key
    return module


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**16:
        raise AdapterError(f"adapter_config.json: {name}: {_shown(value)} is no rank")
    return value


def _alpha(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e9:
        raise AdapterError(f"adapter_config.json: {name}: {_shown(value)} is no finite number")
    return float(value)


def _corrected(fields: Mapping[str, Any]) -> bool | None:
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", str(fields.get("peft_version", "")))
    return None if version is None else tuple(map(int, version.groups())) >= CORRECTED


def _switch(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise AdapterError(f"adapter_config.json: {name}: must be true or false")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
