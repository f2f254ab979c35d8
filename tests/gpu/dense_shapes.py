"""Twelve dense models that no table of launch shapes names, as folders with a ``config.json`` each.

    python -m tests.gpu.dense_shapes FOLDER
    pagebus bench engine --model FOLDER/NAME --load-format dummy --skip-tokenizer-init

1 to 32 billion parameters, heads of 64 to 256, 1 to 16 query heads for a key head, some with biases. Sizes are those of
the published models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(kind: str, architecture: str, sizes: str, **fields: Any) -> dict[str, Any]:
    """``sizes``: hidden, intermediate, layers, heads, key heads, size of a head, vocabulary."""
    hidden, intermediate, layers, heads, key_heads, head_dim, vocab = map(int, sizes.split())
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | fields


def qwen(sizes: str, **fields: Any) -> dict[str, Any]:
    """Biases on queries, keys and values."""
    return config("qwen2", "Qwen2ForCausalLM", sizes, use_sliding_window=False, **fields)


def gemma2(sizes: str) -> dict[str, Any]:
    """Norms on both sides, soft caps, a window in every second layer."""
    return config(
        "gemma2", "Gemma2ForCausalLM", sizes, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096,
        rope_theta=1e4, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip


DENSE = {
    "llama3.2-1b": config(
        "llama", "LlamaForCausalLM", "2048 8192 16 32 8 64 128256", tie_word_embeddings=True, rope_theta=5e5,
        rope_scaling=LLAMA3_ROPE,
    ),
    "qwen2.5-1.5b": qwen("1536 8960 28 12 2 128 151936", tie_word_embeddings=True),
    "granite3.3-2b": config(
        "granite", "GraniteForCausalLM", "2048 8192 40 32 8 64 49159", tie_word_embeddings=True, attention_bias=False,
        mlp_bias=False, attention_multiplier=0.015625, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=8.0, rope_theta=1e7,
    ),
    "gemma2-2b": gemma2("2304 9216 26 8 4 256 256000"),
    "qwen2.5-3b": qwen("2048 11008 36 16 2 128 151936", tie_word_embeddings=True),
    "phi3-mini": config(
        "phi3", "Phi3ForCausalLM", "3072 8192 32 32 32 96 32064", rope_theta=1e4, pad_token_id=32000
    ),
    "qwen2.5-7b": qwen("3584 18944 28 28 4 128 152064"),
    "mistral-7b": config("mistral", "MistralForCausalLM", "4096 14336 32 32 8 128 32768", sliding_window=None),
    "glm4-9b": config(
        "glm", "GlmForCausalLM", "4096 13696 40 32 2 128 151552", attention_bias=True, partial_rotary_factor=0.5,
        rope_theta=1e4,
    ),
    "gemma2-9b": gemma2("3584 14336 42 16 8 256 256000"),
    "phi4-14b": config("phi3", "Phi3ForCausalLM", "5120 17920 40 40 10 128 100352", rope_theta=2.5e5),
    "qwen2.5-32b": qwen("5120 27648 64 40 8 128 152064"),
}  # fmt: skip


def write_folders(root: Path) -> None:
    for name, fields in DENSE.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields, indent=2))


if __name__ == "__main__":
    write_folders(Path(sys.argv[1]))
