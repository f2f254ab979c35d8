"""What quantized weights take in memory."""

from __future__ import annotations

from statistics import fmean

from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.quantization.scheme import Scheme

SCALE_BITS = {"float": 32, "e8m0": 8, "e4m3": 8}


def bits_per_weight(quantization: Quantization | None) -> float:
    """Of a weight of the layers, with its part of scales, zero points and minima; 0 if they are not quantized. Where a
    checkpoint has several schemes and none for what it does not name, their mean."""
    if quantization is None:
        return 0.0
    if quantization.default is not None:
        return _bits(quantization.default)
    named = [rule.scheme for rule in quantization.rules]
    schemes = [scheme for scheme in (*named, *(quantization.exact or {}).values()) if scheme is not None]
    return fmean(map(_bits, schemes)) if schemes else 0.0


def _bits(scheme: Scheme) -> float:
    """Scales of rows and of high blocks are next to nothing."""
    bits, (rows, columns) = (4 if scheme.bits <= 4 else 8), scheme.block
    if not columns or rows > 1:
        return float(bits)
    zero = (8 if bits == 4 else 32) if scheme.zeros else 0
    return bits + (SCALE_BITS[scheme.scales] + zero + 32 * scheme.lows) / columns
