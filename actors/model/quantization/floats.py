"""FP8 as most checkpoints have it, FBGEMM's, and ModelOpt's FP8 and NVFP4."""

from __future__ import annotations

from pagebus.actors.model.quantization.entries import Entries
from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.quantization.scheme import Scheme

IGNORED = ("ignored_layers", "modules_to_not_convert", "ignore")


def parse_fp8(entries: Entries) -> Quantization:
    """A scale of each tensor, or of each block."""
    entries.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    entries.one_of("scale_fmt", ("ue8m0", "float", "float32"), "float")
    activations = entries.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block = entries.get("weight_block_size")
    if block is None:
        scheme = Scheme("fp8", "e4m3", 8, (0, 0), activations=activations)
    else:
        if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
            raise entries.wrong("weight_block_size", "is no pair of sizes")
        scheme = Scheme("fp8", "e4m3", 8, (block[0], block[1]), activations=activations)
    return Quantization("fp8", scheme, entries.ignored("part", *IGNORED))


def parse_fbgemm(entries: Entries) -> Quantization:
    """A scale of each row, ``weight_scale`` [N, 1]."""
    scheme = Scheme("fp8", "e4m3", 8, (1, 0), activations="dynamic")
    return Quantization("fbgemm_fp8", scheme, entries.ignored("part", "modules_to_not_convert"))


def parse_modelopt(entries: Entries) -> Quantization:
    """``quant_algo`` and patterns with stars of what is not quantized; newer files hold what compressed-tensors' do."""
    algorithm = entries.one_of("quant_algo", ("FP8", "NVFP4"))
    if algorithm == "FP8":
        scheme = Scheme("fp8", "e4m3", 8, (0, 0), activations="static")
    else:
        group = entries.integer("group_size", default=16)
        if group != 16:
            raise entries.wrong("group_size", "is not supported (only 16)")
        scheme = Scheme("modelopt_nvfp4", "e2m1", 4, (1, 16), scales="e4m3", activations="static")
    return Quantization("modelopt", scheme, entries.ignored("glob", "exclude_modules", "ignore"))
