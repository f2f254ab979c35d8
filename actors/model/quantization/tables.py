"""bitsandbytes, and gpt-oss's MXFP4."""

from __future__ import annotations

from typing import Literal

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
