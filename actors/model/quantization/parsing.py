"""Finds what a checkpoint says of its quantization, and reads it with its method's own parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.quantization import compressed, floats, grouped, tables, torchao
from pagebus.actors.model.quantization.entries import Entries
from pagebus.actors.model.quantization.quantization import Quantization

Parser = Callable[[Entries], Quantization]

METHODS: Mapping[str, Parser] = {
    "fp8": floats.parse_fp8,
    "fbgemm_fp8": floats.parse_fbgemm,
    "modelopt": floats.parse_modelopt,
    "compressed-tensors": compressed.parse,
    "gptq": grouped.parse_gptq,
    "awq": grouped.parse_awq,
    "bitsandbytes": tables.parse_bitsandbytes,
    "mxfp4": tables.parse_mxfp4,
    "torchao": torchao.parse_torchao,
}
ALIASES = {
    "compressed_tensors": "compressed-tensors", "modelopt_fp4": "modelopt", "modelopt_fp8": "modelopt",
    "gptq_marlin": "gptq", "gptqmodel": "gptq", "awq_marlin": "awq", "nvfp4": "modelopt",
}  # fmt: skip
"""Other names of methods, in files and on vLLM's command line."""


NAMES = ("quantization_config", "compression_config")
"""What the object is called in ``config.json``; the second is older, and of compressed-tensors alone."""


def quantization_fields(fields: Fields) -> object:
    """What ``config.json`` says of it; None: nothing."""
    return next((fields.get(name) for name in NAMES if fields.get(name)), None)


def method_of(name: str) -> str:
    """The method that ``name`` means."""
    return ALIASES.get(name, name)


def parse_quantization(
    said: object, side: Mapping[str, Any], where: str = "quantization_config"
) -> Quantization | None:
    """From ``quantization_config`` of ``config.json``, else from the object of a file beside it; None: not quantized.

    Raises:
        ModelError: a method or a field that is not read; the text names it.
    """
    if not said and "quantization" in side:  # hf_quant_config.json
        where = "hf_quant_config.json"
        said = {"quant_method": "modelopt", **_object(side["quantization"], where)}
    elif not said and "bits" in side:  # AutoGPTQ
        said, where = {"quant_method": "gptq", **side}, "quantize_config.json"
    elif not said and "w_bit" in side:  # AWQ
        said, where = {"quant_method": "awq", **side}, "quant_config.json"
    if not said:
        return None
    entries = Entries(_object(said, where), where)
    method = entries.get("quant_method")
    if method is None and ("load_in_4bit" in entries or "load_in_8bit" in entries):
        method = "bitsandbytes"
    parser = METHODS.get(method_of(str(method).lower()))
    if parser is None:
        known = ", ".join(METHODS)
        raise ModelError(f"{where}: quant_method {method!r} is not supported (supported: {known})")
    return parser(entries)


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ModelError(f"{where} is no JSON object")
    return value
