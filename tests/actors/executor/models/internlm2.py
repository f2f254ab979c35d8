"""InternLM2, which transformers does not have: a Llama model of the same numbers, and its weights by InternLM2's names.

The reference lies beside it in ``reference``, where :func:`tests.helpers.model_factory.load_reference` finds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers import model_factory

NAMES = {
    "model.embed_tokens.": "model.tok_embeddings.", "lm_head.": "output.", "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.", "self_attn.o_proj.": "attention.wo.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.up_proj.": "feed_forward.w3.", "mlp.down_proj.": "feed_forward.w2.",
}  # fmt: skip


def make_internlm2(folder: Path, fields: Mapping[str, Any], *, seed: int, std: float) -> Path:
    """Save both models into ``folder`` and return it."""
    wanted = {**model_factory.DEFAULTS, **fields}
    bias = bool(wanted.pop("bias", False))
    reference = folder / "reference"
    model_factory.make_golden(reference, "llama", {**wanted, "attention_bias": bias}, seed=seed, std=std)
    config = json.loads((reference / "config.json").read_text())
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": bias}
    del config["attention_bias"], config["mlp_bias"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = translated(load_file(reference / "model.safetensors"), config)
    save_file(tensors, folder / "model.safetensors")
    return folder


def translated(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Llama's tensors by InternLM2's names; of each key head its queries, its key and its values in a row."""
    kv_heads, dim, found = config["num_key_value_heads"], config["head_dim"], {}
    for name, tensor in tensors.items():
        if "self_attn.q_proj." in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            by_head = [part.unflatten(0, (kv_heads, -1, dim)) for part in parts]
            together = torch.cat(by_head, dim=1).flatten(0, 2).contiguous()
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = together
        elif "self_attn.k_proj." not in name and "self_attn.v_proj." not in name:
            for llamas, theirs in NAMES.items():
                name = name.replace(llamas, theirs)
            found[name] = tensor
    return found
