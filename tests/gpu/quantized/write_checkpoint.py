"""Writes a random FP8 checkpoint of a real size, whose start can then be measured from the page cache:

    python -m tests.gpu.quantized.write_checkpoint llama8b FOLDER
    pagebus bench start --model FOLDER/llama8b --repeats 3

Rows of float8_e4m3fn with a scale each, in the format of compressed-tensors, whose tokens are rounded as they come;
embedding and head in bfloat16. A file for each layer, as hubs have many. 9 GB for llama8b, written in about a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder

SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
Tensors = dict[str, torch.Tensor]


def write_weights(folder: Path) -> None:
    """Those of the Llama that ``folder``'s config.json describes, which gets the scheme."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": SCHEME}, indent=2))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_files(config)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _files(config: dict[str, Any]) -> Iterator[Tensors]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    ends: Tensors = {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}
    for name in ("model.embed_tokens.weight", *(() if config.get("tie_word_embeddings") else ("lm_head.weight",))):
        ends[name] = torch.empty(vocabulary, hidden, dtype=torch.bfloat16).uniform_(-0.02, 0.02)
    yield ends
    for layer in range(config["num_hidden_layers"]):
        yield {f"model.layers.{layer}.{name}": tensor for name, tensor in _layer(config).items()}


def _layer(config: dict[str, Any]) -> Tensors:
    hidden, width, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, config.get("num_key_value_heads", heads) * size
    found = {
        f"{name}_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in ("input", "post_attention")
    }
    for name, rows, columns in (
        ("self_attn.q_proj", queries, hidden), ("self_attn.k_proj", keys, hidden), ("self_attn.v_proj", keys, hidden),
        ("self_attn.o_proj", hidden, queries), ("mlp.gate_proj", width, hidden), ("mlp.up_proj", width, hidden),
        ("mlp.down_proj", hidden, width),
    ):  # fmt: skip
        numbers = torch.randint(-100, 101, (rows, columns), dtype=torch.int8)
        found[f"{name}.weight"] = numbers.to(torch.float16).to(torch.float8_e4m3fn)
        found[f"{name}.weight_scale"] = torch.full((rows, 1), 2e-4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_weights(write_model_folder(arguments.shape, arguments.folder))


if __name__ == "__main__":
    main()
