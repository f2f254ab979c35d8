"""GPTQ and AWQ: whole numbers of a few bits whose groups share a scale, and perhaps a zero point."""

from __future__ import annotations

from typing import Any

from pagebus.actors.model.quantization.entries import Entries
from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.quantization.scheme import Rule, Scheme

GPTQ_BITS = (2, 3, 4, 8)


def parse_gptq(entries: Entries) -> Quantization:
    """``dynamic`` has expressions: ``-:`` for what is not quantized, ``+:`` (or nothing) for what is otherwise."""
    form = entries.one_of("checkpoint_format", ("gptq", "gptq_v2", ""), entries.get("format", "gptq"))
    packing = "gptq_v2" if form == "gptq_v2" else "gptq"
    scheme = _gptq(entries, packing)
    rules = []
    for key, changes in entries.inner("dynamic").raw.items():
        if key.startswith("-:"):
            rules.append(Rule("regex", key[2:], None))
        else:
            changed = Entries({**entries.raw, **_object(entries, changes)}, f"{entries.where}: dynamic {key!r}")
            rules.append(Rule("regex", key.removeprefix("+:"), _gptq(changed, packing)))
    rules += entries.ignored("part", "modules_to_not_convert")
    inner = entries.words("modules_in_block_to_quantize") if _flat(entries) else ()
    kept = [Rule("part", name, scheme) for name in inner]
    rules += [*kept, Rule("all", "", None)] if kept else []
    return Quantization("gptq", scheme, tuple(rules), head=bool(entries.get("lm_head", False)))


def _gptq(entries: Entries, packing: str) -> Scheme:
    bits = entries.one_of("bits", GPTQ_BITS)
    group = _group(entries, entries.integer("group_size", default=128))
    zeros, ordered = not entries.flag("sym", default=True), entries.flag("desc_act")
    if bits == 8:
        return Scheme(packing, "uint8", 8, (1, group), zeros=zeros, ordered=ordered)
    return Scheme(packing, "uint4", bits, (1, group), zeros=zeros, ordered=ordered)


def parse_awq(entries: Entries) -> Quantization:
    """The layout of ``gemm`` only: others of the library order their words otherwise."""
    version = entries.get("version", entries.get("format", "gemm"))
    if str(version).lower() != "gemm":
        raise entries.wrong("version" if "version" in entries else "format", "is not supported (only gemm)")
    if entries.get("backend", "autoawq") == "llm-awq":
        raise entries.wrong("backend", "is not supported (only the layout of autoawq's gemm)")
    entries.one_of("bits" if "bits" in entries else "w_bit", (4,), 4)
    group = _group(entries, entries.integer("group_size", "q_group_size", default=128))
    scheme = Scheme("awq", "uint4", 4, (1, group), zeros=entries.flag("zero_point", default=True))
    return Quantization("awq", scheme, entries.ignored("within", "modules_to_not_convert"))


def _group(entries: Entries, size: int) -> int:
    """-1 is all columns."""
    if size == -1:
        return 0
    if size < 1:
        raise entries.wrong("group_size", "is no size of groups")
    return size


def _object(entries: Entries, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise entries.wrong("dynamic", "has no object behind each expression")
    return value


def _flat(entries: Entries) -> bool:
    """``modules_in_block_to_quantize`` is a list of names, or of lists of such."""
    given = entries.get("modules_in_block_to_quantize")
    if isinstance(given, list) and given and all(isinstance(each, list) for each in given):
        entries.replace("modules_in_block_to_quantize", [name for each in given for name in each])
    return given is not None
