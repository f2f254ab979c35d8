"""bitsandbytes, gpt-oss's MXFP4, and TorchAO's plain formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pagebus.actors.model.quantization.entries import Entries
from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.quantization.scheme import Rule, Scheme

BNB_BLOCK = 64
EXPERTS = "mlp.experts"


def parse_bitsandbytes(entries: Entries) -> Quantization:
    """4 bits of a table in blocks of 64, or int8 rows."""
    rules = entries.ignored("part", "llm_int8_skip_modules")
    if entries.get("load_in_8bit") or entries.get("_load_in_8bit"):
        return Quantization("bitsandbytes", Scheme("bnb_int8", "int8", 8, (1, 0)), rules)
    if not (entries.get("load_in_4bit") or entries.get("_load_in_4bit")):
        raise entries.wrong("load_in_4bit", "and load_in_8bit: neither is true")
    kind: Literal["nf4", "fp4"] = entries.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    return Quantization("bitsandbytes", Scheme("bnb_4bit", kind, 4, (1, BNB_BLOCK)), rules)


def parse_mxfp4(entries: Entries) -> Quantization:
    """All experts, in blocks of 32, and nothing else."""
    scheme = Scheme("mxfp4", "e2m1", 4, (1, 32), scales="e8m0")
    rules = (*entries.ignored("glob", "modules_to_not_convert"), Rule("part", EXPERTS, scheme))
    return Quantization("mxfp4", None, rules)


PLAIN: Mapping[str, Scheme] = {
    "Int8WeightOnlyConfig": Scheme("torchao", "int8", 8, (1, 0)),
    "Int8DynamicActivationInt8WeightConfig": Scheme("torchao", "int8", 8, (1, 0), activations="dynamic"),
    "Float8WeightOnlyConfig": Scheme("torchao", "e4m3", 8, (1, 0)),
    "Float8DynamicActivationFloat8WeightConfig": Scheme("torchao", "e4m3", 8, (1, 0), activations="dynamic"),
}


def parse_torchao(entries: Entries) -> Quantization:
    """``quant_type.default._type`` names the configuration class; rows of int8 and of float8 are read."""
    default = entries.inner("quant_type").inner("default")
    kind = str(default.get("_type"))
    if kind not in PLAIN:
        raise default.wrong("_type", f"is not supported (only {', '.join(PLAIN)})")
    data: Mapping[str, Any] = default.inner("_data").raw
    if data.get("group_size") is not None:
        raise default.wrong("_data", "has a group_size, which is not supported")
    return Quantization("torchao", PLAIN[kind], entries.ignored("part", "modules_to_not_convert"))
