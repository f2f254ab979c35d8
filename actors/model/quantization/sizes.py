"""The memory of quantized weights."""

from __future__ import annotations

from statistics import fmean

from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.quantization.scheme import Scheme

SCALE_BITS = {"float": 32, "e8m0": 8, "e4m3": 8}


def bits_per_weight(quantization: Quantization | None) -> float:
    """Bits of one weight of the layers, scales, zero points and minima included; 0 if they are not quantized. The mean
    of all schemes, if a checkpoint has several and no default."""
    if quantization is None:
        return 0.0
    if quantization.default is not None:
        return _bits(quantization.default)
    named = [rule.scheme for rule in quantization.rules]
    schemes = [scheme for scheme in (*named, *(quantization.exact or {}).values()) if scheme is not None]
    return fmean(map(_bits, schemes)) if schemes else 0.0


def _bits(scheme: Scheme) -> float:
    """Bits of one weight; scales of rows and of high blocks are too few to count."""
    bits, (rows, columns) = (4 if scheme.bits <= 4 else 8), scheme.block
    if not columns or rows > 1:
        return float(bits)
    zero = (8 if bits == 4 else 32) if scheme.zeros else 0
    return bits + (SCALE_BITS[scheme.scales] + zero + 32 * scheme.lows) / columns
