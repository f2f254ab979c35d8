"""Rotary embeddings as ``config.json`` says them, in both dialects: ``rope_scaling`` beside ``rope_theta``, or
``rope_parameters`` with everything, perhaps by layer type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import RopeKind, RopeLayout, RopeSpec

KINDS: dict[str, RopeKind] = {
    "default": "default", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3", "yarn": "yarn",
    "longrope": "longrope", "su": "longrope",
}  # fmt: skip
BETA_FAST, BETA_SLOW = 32.0, 1.0


def rope_fields(fields: Fields, kind: str | None = None) -> dict[str, Any]:
    """All that is said of the rotary embeddings, of layers of this ``kind``. Raises ModelError."""
    new, old = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise ModelError("config.json: rope_parameters and rope_scaling must be objects")
    said = {**old, **new}
    nested = {key: value for key, value in said.items() if isinstance(value, dict)}
    if nested and (kind is None or kind not in nested):
        raise ModelError("config.json: rope_parameters that differ by layer are not supported")
    return dict(nested[kind]) if nested and kind is not None else said


def parse_rope(
    fields: Fields, head_dim: int, *, kind: str | None = None, partial: float | None = None,
    layout: RopeLayout = "half", base: float = 10000.0,
) -> RopeSpec:  # fmt: skip
    """One table of angles; ``partial`` is the default share of a head that turns, None: only whole heads may.

    Raises:
        ModelError: a kind that is not known, or a number that is missing or makes no sense.
    """
    said = rope_fields(fields, kind)
    base = Fields({"rope_theta": said.get("rope_theta", fields.get("rope_theta"))}).number("rope_theta", base)
    share = said.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if partial is None and share not in (None, 1):
        raise ModelError(f"config.json: partial_rotary_factor {share} is not supported (only 1)")
    share = Fields({"partial_rotary_factor": share}).number("partial_rotary_factor", partial or 1.0)
    dims = int(head_dim * share)
    if dims % 2 or not 0 < dims <= head_dim:
        raise ModelError(f"config.json: partial_rotary_factor {share} turns {dims} of {head_dim} dimensions")
    name = said.get("rope_type", said.get("type", "default"))
    if name not in KINDS:
        raise ModelError(f"config.json: rope type {name!r} is not supported (supported: {', '.join(KINDS)})")
    numbers = Fields({"original_max_position_embeddings": fields.get("original_max_position_embeddings")} | said)
    return RopeSpec(dims, base, KINDS[name], layout, **_scaling(KINDS[name], numbers, fields, dims))


def max_positions(rope: RopeSpec, num_positions: int) -> int:
    """The most positions that a model with ``num_positions`` in its configuration can have, stretched."""
    if rope.kind not in ("linear", "dynamic", "yarn"):
        return num_positions
    return max(num_positions, math.floor(rope.original * rope.factor))


def default_positions(rope: RopeSpec, num_positions: int) -> int:
    """How many it has unless more are asked for: dynamic stretching changes all prompts, so it is not the default."""
    return num_positions if rope.kind == "dynamic" else max_positions(rope, num_positions)


def _scaling(kind: RopeKind, said: Fields, fields: Fields, dims: int) -> Mapping[str, Any]:
    """The fields of a :class:`RopeSpec` that are this kind's."""
    if kind == "default":
        return {}
    positions = fields.integer("max_position_embeddings")
    original = said.integer("original_max_position_embeddings", positions)
    if kind in ("linear", "dynamic"):
        return {"factor": said.number("factor"), "original": positions}
    if kind == "llama3":
        return _llama3(said, original)
    factor = said.number("factor", positions / original)
    if kind == "yarn":
        return _yarn(said, factor, original)
    growth = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {name: _factors(said, f"{name}_factor", dims) for name in ("short", "long")}
    attention = said.number("attention_factor", growth)
    return {"factor": factor, "original": original, "attention_factor": attention, **factors}


def _llama3(said: Fields, original: int) -> dict[str, Any]:
    low, high = said.number("low_freq_factor"), said.number("high_freq_factor")
    if low > high:
        raise ModelError(f"config.json: rope low_freq_factor {low} is above high_freq_factor {high}")
    return {"factor": said.number("factor"), "original": original, "low": low, "high": high}


def _yarn(said: Fields, factor: float, original: int) -> dict[str, Any]:
    """``attn_factor`` multiplies the growth that is calculated. vLLM knows it, and DeepSeek-R1-0528-Qwen3-8B has it so
    that nothing grows; transformers passes over it."""
    attention = said.get("attention_factor")
    if attention is None:
        one, all_dims = said.get("mscale"), said.get("mscale_all_dim")
        attention = _growth(factor, one) / _growth(factor, all_dims) if one and all_dims else _growth(factor, 1.0)
        attention *= said.number("attn_factor", 1.0)
    return {
        "factor": factor, "original": original, "attention_factor": float(attention),
        "low": said.number("beta_slow", BETA_SLOW), "high": said.number("beta_fast", BETA_FAST),
        "truncate": bool(said.get("truncate", True)),
    }  # fmt: skip


def _growth(factor: float, scale: float) -> float:
    """By how much yarn makes scores larger where it stretches positions ``factor`` times."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _factors(said: Fields, key: str, dims: int) -> tuple[float, ...]:
    values = said.get(key)
    good = isinstance(values, list) and all(isinstance(each, int | float) and each > 0 for each in values)
    if not good or len(values) != dims // 2:
        raise ModelError(f"config.json: rope {key} must list {dims // 2} numbers above 0")
    return tuple(map(float, values))
