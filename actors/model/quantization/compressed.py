"""compressed-tensors: groups of modules, each with a scheme and its format."""

from __future__ import annotations

from typing import Literal

from pagebus.actors.model.quantization.entries import Entries
from pagebus.actors.model.quantization.quantization import HEAD, Quantization
from pagebus.actors.model.quantization.scheme import Activations, Match, Rule, Scheme

FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
LINEAR = "Linear"
ORDERED = ("group", "dynamic", True)
"""Spellings of an ``actorder`` that gives columns an order of their own. Others had one while scales were found."""


def parse(entries: Entries) -> Quantization:
    """What ``ignore`` means is not quantized; of others the first group that has it as a target decides."""
    sparsity = entries.inner("sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise entries.wrong("sparsity_config", "is not supported (only dense)")
    if entries.inner("transform_config").get("config_groups"):
        raise entries.wrong("transform_config", "is not supported")
    groups = entries.inner("config_groups")
    rules = [_rule(entry, None) for entry in entries.words("ignore")]
    default, head = None, False
    for name in sorted(groups.raw):
        group = groups.inner(name)
        scheme = _scheme(group, group.get("format", entries.get("format")))
        for target in group.words("targets"):
            if target == LINEAR:
                default = default or scheme
            else:
                rules.append(_rule(target, scheme))
                head = head or HEAD in target
    if not groups.raw:
        raise entries.wrong("config_groups", "has no groups")
    return Quantization("compressed-tensors", default, tuple(rules), head)


def _rule(entry: str, scheme: Scheme | None) -> Rule:
    match: Match = "regex" if entry.startswith("re:") else "name"
    return Rule(match, entry.removesuffix(".linear"), scheme)


def _scheme(group: Entries, form: object) -> Scheme:
    weights = group.inner("weights")
    if not weights.raw:
        raise group.wrong("weights", "are not quantized, which is not supported")
    if form not in FORMATS:
        raise group.wrong("format", f"({form!r}) is not supported (only {', '.join(FORMATS)})")
    if weights.flag("dynamic"):
        raise weights.wrong("dynamic", "is not supported for weights")
    kind: Literal["int", "float"] = weights.one_of("type", ("int", "float"), "int")
    bits, activations = weights.integer("num_bits", default=8), _activations(group)
    if form == "nvfp4-pack-quantized":
        return Scheme("ct_nvfp4", "e2m1", 4, (1, 16), scales="e4m3", activations=activations)
    if form == "mxfp4-pack-quantized":
        return Scheme("ct_mxfp4", "e2m1", 4, (1, 32), scales="e8m0", activations=activations)
    if form == "mxfp8-quantized":
        return Scheme("ct_mxfp8", "e4m3", 8, (1, 32), scales="e8m0", activations=activations)
    block, zeros = _block(weights), not weights.flag("symmetric", default=True)
    if form == "pack-quantized":
        if kind != "int" or not 1 < bits <= 8:
            raise weights.wrong("num_bits", "is not supported in this format (only whole numbers of 2 to 8 bits)")
        ordered = weights.get("actorder") in ORDERED
        numbers: Literal["uint4", "uint8"] = "uint4" if bits <= 4 else "uint8"
        return Scheme("ct_packed", numbers, bits, block, zeros=zeros, ordered=ordered, activations=activations)
    if bits != 8:
        raise weights.wrong("num_bits", "is not supported in this format (only 8)")
    if kind == "float":
        return Scheme("ct_plain", "e4m3", 8, block, activations=activations)
    return Scheme("ct_plain", "int8", 8, block, zeros=zeros, activations=activations)


def _block(weights: Entries) -> tuple[int, int]:
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), "tensor")
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy == "group":
        return 1, weights.integer("group_size")
    block = weights.get("block_structure")
    if isinstance(block, str):
        block = [int(part) for part in block.split("x") if part.isdigit()]
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise weights.wrong("block_structure", "is no pair of sizes")
    return block[0], block[1]


def _activations(group: Entries) -> Activations:
    if "input_activations" not in group:
        return "none"
    dynamic = group.inner("input_activations").get("dynamic", False)
    return "dynamic" if dynamic in (True, "local") else "static"
