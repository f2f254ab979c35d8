"""Reads TorchAO's configurations: bits, and the blocks that share a scale."""

from __future__ import annotations

from typing import Any

from pagebus.actors.model.quantization.entries import Entries
from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.quantization.scheme import Activations, Scheme

ROWS = ("PerRow", "PerTensor", "PerAxis")
"""Granularities with one scale per row, or one for all rows."""
CONFIGS = {
    "Int8WeightOnlyConfig": "int8", "Int8DynamicActivationInt8WeightConfig": "int8",
    "Float8WeightOnlyConfig": "float8", "Float8DynamicActivationFloat8WeightConfig": "float8",
    "Int4WeightOnlyConfig": "int4", "Float8DynamicActivationInt4WeightConfig": "int4",
    "IntxWeightOnlyConfig": "intx", "Int8DynamicActivationIntxWeightConfig": "intx",
}  # fmt: skip
"""The configurations that are read, and the numbers that their weights become."""


def parse_torchao(entries: Entries) -> Quantization:
    """``quant_type.default`` is the configuration as the library writes it: ``_type`` names its class."""
    default = entries.inner("quant_type").inner("default")
    kind = str(default.get("_type"))
    if kind not in CONFIGS:
        raise default.wrong("_type", f"is not supported (only {', '.join(CONFIGS)})")
    activations: Activations = "dynamic" if "DynamicActivation" in kind else "none"
    scheme = _scheme(CONFIGS[kind], default.inner("_data"), activations)
    return Quantization("torchao", scheme, entries.ignored("part", "modules_to_not_convert"))


def _scheme(weights: str, data: Entries, activations: Activations) -> Scheme:
    if weights == "int4":
        data = Entries({"int4_packing_format": "PLAIN", **data.raw}, data.where)
        if str(_plain(data.get("int4_packing_format"))).upper() != "PLAIN":
            raise data.wrong(
                "int4_packing_format", "is not supported (only plain: others are in an order for a kernel)"
            )
        group = data.integer("group_size", default=128)
        if group < 1:
            raise data.wrong("group_size", "is no group of columns")
        return Scheme("torchao_int4", "uint4", 4, (1, group), lows=True, activations=activations)
    if data.get("group_size") is not None:
        raise data.wrong("group_size", "is not supported (only a granularity)")
    if weights == "intx":
        block = _block(data, "granularity" if "granularity" in data else "weight_granularity")
        if block[0] != 1:
            raise data.wrong("granularity", "is not supported here (only rows and groups of columns)")
        return Scheme("torchao", "int8", 8, block, zeros=True, activations=activations)
    block = _block(data, "granularity")
    return Scheme("torchao", "e4m3" if weights == "float8" else "int8", 8, block, activations=activations)


def _block(data: Entries, key: str) -> tuple[int, int]:
    """The block (rows, columns) of the weight, 0 for all. Of two granularities the last counts: it is the weight's."""
    given = data.get(key)
    given = given[-1] if isinstance(given, list) and given else given
    if given is None:
        return 1, 0
    kind = given.get("_type") if isinstance(given, dict) else None
    if kind in ROWS:
        return 1, 0
    inner = Entries(given, f"{data.where}: {key}").inner("_data") if kind in ("PerGroup", "PerBlock") else None
    if inner is None:
        raise data.wrong(key, f"is not supported (only {', '.join((*ROWS, 'PerGroup', 'PerBlock'))})")
    if kind == "PerGroup":
        return 1, max(1, inner.integer("group_size"))
    size = inner.get("block_size")
    if not isinstance(size, list) or len(size) != 2 or any(type(each) is not int or each < 1 for each in size):
        raise inner.wrong("block_size", "is no pair of sizes")
    return size[0], size[1]


def _plain(value: Any) -> Any:
    """An enumeration's value as the library writes it: an object with the name, or the text itself."""
    return value.get("_data") if isinstance(value, dict) else value
