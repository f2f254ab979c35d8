"""Maps the names of tensors in GGUF files to ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.gguf.header import GgufFile, GgufTensor

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
"""Names of a layer's tensors."""
STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Names of a layer's experts, all of them in one tensor."""
SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tables that become part of the configuration."""
MOST_EXPERTS = 4096
"""Of a layer; each becomes a tensor of its own. No model comes near."""
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def our_tensors(file: GgufFile, others: Mapping[str, str]) -> dict[str, GgufTensor]:
    """All tensors of the model by our names, the experts of a layer one by one. ``others``: the architecture's names
    that differ from those of most.

    Raises:
        ModelError: the architecture has no such tensor, or a layer has more than MOST_EXPERTS experts.
    """
    found: dict[str, GgufTensor] = {}
    inside = {**INSIDE, **others}
    for tensor in file.tensors.values():
        if tensor.name not in TABLES:
            found |= dict(_ours(tensor, inside))
    return found


def _ours(tensor: GgufTensor, inside: Mapping[str, str]) -> Iterator[tuple[str, GgufTensor]]:
    layer = LAYER.fullmatch(tensor.name)
    module, _, suffix = tensor.name.rpartition(".")
    if layer is None and module in OUTSIDE:
        yield f"{OUTSIDE[module]}.{suffix}", tensor
        return
    name = "" if layer is None else layer[2]
    if layer is None or (name not in inside and name not in STACKED):
        raise ModelError(f"{tensor.file}: tensor {tensor.name} is not one that its architecture has here")
    prefix, suffix = f"model.layers.{layer[1]}", layer[3]
    if name in STACKED:
        for expert, part in enumerate(_experts(tensor)):
            yield f"{prefix}.mlp.experts.{expert}.{STACKED[name]}.{suffix}", part
    elif name == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        yield f"{prefix}.{inside[name]}.{suffix}", replace(tensor, shape=(1, *tensor.shape))
    else:
        yield f"{prefix}.{inside[name]}.{suffix}", tensor


def _experts(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The parts [N, K] of a tensor [E, N, K]. Raises ModelError."""
    if len(tensor.shape) != 3:
        raise ModelError(f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, no three dimensions")
    count = tensor.shape[0]
    if count > MOST_EXPERTS:
        raise ModelError(f"{tensor.file}: tensor {tensor.name} has {count} experts, more than {MOST_EXPERTS}")
    size = tensor.num_bytes // count
    for expert in range(count):
        yield replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * size, num_bytes=size)
