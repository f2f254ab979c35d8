"""EAGLE-3 heads with random weights, in both formats, and the plainest thing that computes one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, BASE, EPS = 64, 4, 2, 64, 96, 10000.0, 1e-5
"""Of all heads here; head sizes are those that kernels take."""


@dataclass(frozen=True)
class TinyHead:
    """A head of a model with ``hidden`` numbers, ``vocab`` tokens and so many ``layers``; ``speculators``: in that
    format, else in SafeAILab's, and ``flags`` are fields of its config.json. It knows the tokens ``known``."""

    hidden: int
    vocab: int
    taps: tuple[int, ...]
    speculators: bool = True
    own_embedding: bool = True
    known: tuple[int, ...] = tuple(range(1, 201))
    kv_heads: int = KV_HEADS
    """Each is read by as many queries as of other heads."""
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.kv_heads * HEADS // KV_HEADS

    @property
    def width(self) -> int:
        """Of the head's hidden states; those of the model, where it has the model's embedding."""
        return HIDDEN if self.own_embedding else self.hidden

    def save(self, folder: Path, seed: int = 0, **changes: Any) -> Path:
        """Write it, with fields and tensors as ``changes`` say (None: without)."""
        folder.mkdir(parents=True, exist_ok=True)
        raw = self.config() | {name: value for name, value in changes.items() if not isinstance(value, torch.Tensor)}
        tensors = self.tensors(seed)
        for name, value in changes.items():
            if name in tensors or isinstance(value, torch.Tensor):
                raw.pop(name, None)
                tensors.pop(name, None)
                if value is not None:
                    tensors[name] = value
        prefix = "layers.0." if self.speculators else "midlayer."
        named = {name.replace("layers.0.", prefix): tensor for name, tensor in tensors.items()}
        (folder / "config.json").write_text(json.dumps(raw))
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors")
        return folder

    def config(self) -> dict[str, Any]:
        layer = {
            "model_type": "llama", "vocab_size": self.vocab, "hidden_size": self.width, "num_hidden_layers": 1,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": HEAD_DIM,
            "intermediate_size": WIDTH, "rms_norm_eps": EPS, "rope_theta": BASE, "max_position_embeddings": 512,
        }  # fmt: skip
        more = {"draft_vocab_size": len(self.known), "target_hidden_size": self.hidden, **self.flags}
        if self.speculators:
            taps = {"eagle_aux_hidden_state_layer_ids": list(self.taps)}
            told = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
            return {**told, "transformer_layer_config": layer, **taps, **more}
        behind = [layer - 1 for layer in self.taps]
        return {
            "architectures": ["LlamaForCausalLMEagle3"], **layer, **more,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": behind, "use_aux_hidden_state": True},
        }  # fmt: skip

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        """By the names of ``speculators``."""
        generator = torch.Generator().manual_seed(seed)
        width, read = self.width, len(self.taps) * self.hidden

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5

        def norm(size: int) -> torch.Tensor:
            return 1 + torch.randn(size, generator=generator) / 5

        known = torch.tensor(self.known)
        mask = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, known, True)
        layer = "layers.0."
        found = {
            "fc.weight": weight(width, read),
            "norm.weight": norm(width),
            "lm_head.weight": weight(len(known), width),
            "d2t": known - torch.arange(len(known)),
            "t2d": mask,
            f"{layer}self_attn.q_proj.weight": weight(self.heads * HEAD_DIM, 2 * width),
            f"{layer}self_attn.k_proj.weight": weight(self.kv_heads * HEAD_DIM, 2 * width),
            f"{layer}self_attn.v_proj.weight": weight(self.kv_heads * HEAD_DIM, 2 * width),
            f"{layer}self_attn.o_proj.weight": weight(width, self.heads * HEAD_DIM),
            f"{layer}mlp.gate_proj.weight": weight(WIDTH, width),
            f"{layer}mlp.up_proj.weight": weight(WIDTH, width),
            f"{layer}mlp.down_proj.weight": weight(width, WIDTH),
        }
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            found[f"{layer}{name}.weight"] = norm(width)
        if self.own_embedding:
            found["embed_tokens.weight"] = weight(self.vocab, width)
        if self.flags.get("norm_before_fc"):
            found["input_norm.weight"] = norm(read)
        if self.flags.get("fc_norm"):
            found |= {f"fc_norm.{place}.weight": norm(self.hidden) for place in range(len(self.taps))}
        return found


def plain_drafts(
    head: TinyHead,
    weights: dict[str, torch.Tensor],
    hidden: torch.Tensor,
    ids: Sequence[int],
    count: int,
    window: int = 0,
) -> list[int]:
    """``count`` drafts behind the tokens ``ids`` [L] from the model's hidden states [L - 1, taps * H] of all but the
    last. All is computed anew for each: dense attention, no cache. ``window`` 0: all tokens are seen."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weights[f"{name}.weight"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        angles = torch.outer(torch.arange(len(x)), BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    if head.flags.get("norm_before_fc"):
        hidden = norm("input_norm", hidden)
    if head.flags.get("fc_norm"):
        parts = hidden.chunk(len(head.taps), dim=1)
        hidden = torch.cat([norm(f"fc_norm.{place}", part) for place, part in enumerate(parts)], dim=1)
    features, tokens, drafts = hidden @ weights["fc.weight"].T, list(ids), []
    for _ in range(count):
        normed = norm("layers.0.hidden_norm", features)
        stream = normed if head.flags.get("norm_before_residual") else features
        embedded = F.embedding(torch.tensor(tokens[1:]), weights["embed_tokens.weight"])
        x = torch.cat((norm("layers.0.input_layernorm", embedded), normed), dim=1)
        q, k, v = (
            (x @ weights[f"layers.0.self_attn.{name}_proj.weight"].T).view(len(x), -1, HEAD_DIM) for name in "qkv"
        )
        q, k = turned(q), turned(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        seen = seen.triu(1 - window) if window else seen
        attended = F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)), attn_mask=seen)
        out = attended.transpose(0, 1).flatten(1)
        stream = stream + out @ weights["layers.0.self_attn.o_proj.weight"].T
        x = norm("layers.0.post_attention_layernorm", stream)
        gate, up, down = (weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        stream = stream + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        best = int((norm("norm", stream[-1:]) @ weights["lm_head.weight"].T).argmax())
        drafts.append(best + int(weights["d2t"][best]))
        feature = norm("norm", stream[-1:]) if head.flags.get("norm_output") else stream[-1:]
        features = torch.cat((features, feature))
        tokens.append(drafts[-1])
    return drafts


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of a saved head, by the names of ``speculators``."""
    found = load_file(folder / "model.safetensors")
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in found.items()}
