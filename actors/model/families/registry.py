"""Which family an architecture belongs to, and why others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.families import (
    cohere,
    gemma,
    glm,
    granite,
    internlm,
    llama,
    mistral,
    olmo,
    phi3,
    qwen,
    smollm3,
    starcoder,
)
from pagebus.actors.model.families.experts import glm_moe, gpt_oss, granite_moe, llama4, mixtral, qwen_moe
from pagebus.actors.model.families.latent import deepseek, glm_flash, minicpm3, mistral4
from pagebus.actors.model.families.refused import why_refused
from pagebus.actors.model.family import Family
from pagebus.actors.model.oracle import FAMILY as ORACLE_FAMILY
from pagebus.actors.model.pooling.encoders import ENCODERS
from pagebus.actors.model.pooling.heads import causal_name

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY, mistral.MISTRAL, mistral.MINISTRAL, mistral.MINISTRAL3, qwen.QWEN2, qwen.QWEN3, gemma.GEMMA1,
    gemma.GEMMA2, gemma.GEMMA3, phi3.FAMILY, granite.FAMILY, olmo.OLMO2, olmo.OLMO3, smollm3.FAMILY, glm.GLM, glm.GLM4,
    cohere.COHERE, cohere.COHERE2, starcoder.FAMILY, internlm.INTERNLM2, internlm.INTERNLM3, qwen_moe.QWEN2_MOE,
    qwen_moe.QWEN3_MOE, mixtral.FAMILY, granite_moe.PLAIN, granite_moe.SHARED, glm_moe.FAMILY, llama4.FAMILY,
    gpt_oss.FAMILY,
    deepseek.DEEPSEEK2, deepseek.DEEPSEEK3, glm_flash.FAMILY, mistral4.MISTRAL4, minicpm3.MINICPM3,
)  # fmt: skip
ARCHITECTURES = tuple(name for family in FAMILIES for name in family.architectures)
BY_ARCHITECTURE = {name: family for family in (*FAMILIES, *ENCODERS, ORACLE_FAMILY) for name in family.architectures}
TOWERS = {"ministral3": mistral.MINISTRAL3, "mistral4": mistral4.MISTRAL4}
"""By the text model's type, where the architecture is Mistral 3's with images."""
OUTER = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config", "compression_config")
"""Fields of a checkpoint with images that its text model's object may leave to the outer one."""


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family of the first architecture that the configuration names. Raises ModelError."""
    names = raw.get("architectures") or [None]
    name = names[0] if isinstance(names, list) else names
    known = str(name) if name in BY_ARCHITECTURE else causal_name(str(name))
    if known in BY_ARCHITECTURE:
        family = BY_ARCHITECTURE[known]
        text = raw.get("text_config")
        inner = text.get("model_type") if isinstance(text, dict) else None
        return TOWERS.get(str(inner), family) if family is mistral.MISTRAL else family
    if not name:
        raise ModelError(f"config.json names no architecture, which is not supported (supported: {_known()})")
    why = why_refused(str(name))
    raise ModelError(f"architecture {name!r} is not supported{why} (supported: {_known()})")


def text_fields(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The text model's fields, its own before those of the outer object, before the family's defaults. Whether the head
    is tied, the outer object decides: the head is its."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return {**family.defaults, **raw}
    outer = {key: raw[key] for key in OUTER if raw.get(key) is not None}
    left = {key: value for key, value in outer.items() if key == "tie_word_embeddings" or text.get(key) is None}
    return {**family.defaults, **text, **left}


def _known() -> str:
    return ", ".join((*ARCHITECTURES, *(name for family in ENCODERS for name in family.architectures)))
