"""What quantized weights cost, on the shipped model: `python -m tests.actors.executor.loading.formats.quality`.

The text lies beside this file: answers that the model gave itself, sampled at temperature 1, so that no other model's
perplexity on it can be expected to be lower than the exact one's. Computed in float32 on a CPU, with the weights as the
format has them. Prints a table of Markdown: bits of a weight of the layers, the error of the logits over
their spread, how often the likeliest token is another one, the divergence from the exact distribution in nats, and the
perplexity. ``--write`` samples the text anew.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Type

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.model.config import SHIPPED_MODEL, ModelConfig
from pagebus.actors.model.gguf.header import read_header
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.quantization.sizes import bits_per_weight
from pagebus.actors.settings import Settings
from tests.actors.executor.loading.float8_quality import CPU, WORDS, compare, logits_of, texts
from tests.helpers.quantized.gguf_files import write_gguf

TEXT = Path(__file__).with_name("quality_text.json")
FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
"""What ggml's program takes for rows that are no whole blocks of 256."""
PLAIN = (Type.F16, Type.BF16, Type.Q8_0, Type.Q6_K, Type.Q5_K, Type.Q5_1, Type.Q5_0, Type.Q4_K, Type.Q4_1, Type.Q4_0)
Sample = tuple[list[int], int]
"""Token ids, and where the answer begins."""


@dataclass(frozen=True)
class Format:
    """One row of the table. ``load`` gives the model, and the bits of a weight of its layers in the file."""

    name: str
    load: Callable[[Path], tuple[Model, float]]


def formats() -> list[Format]:
    """All, from the most exact on."""
    return [
        Format("float32", lambda folder: (model_of(SHIPPED_MODEL), 16.0)),
        Format("bfloat16", lambda folder: (model_of(SHIPPED_MODEL, dtype=torch.bfloat16), 16.0)),
        *(Format(f"`--quantization {method}`", partial(_online, method)) for method in ("fp8", "int8", "int4")),
        *(Format(f"GGUF `{kind.name}`", partial(_gguf, kind, None)) for kind in PLAIN),
        Format("GGUF, as `Q4_K_M`", partial(_gguf, Type.Q4_K, Type.Q6_K)),
    ]


def _online(method: str, folder: Path) -> tuple[Model, float]:
    model = model_of(SHIPPED_MODEL, method)
    return model, bits_per_weight(model.config.quantization)


def model_of(path: Path, method: str | None = None, dtype: torch.dtype = torch.float32) -> Model:
    """Loaded, perhaps quantized by the way."""
    config = with_quantization(Settings(quantization=method), ModelConfig.load(path))
    model = build_model(config, CPU, dtype, Ops.reference(), 1024, dtype)
    load_weights(model, path, "auto", 0, lambda _: None)
    return model


def _gguf(kind: Type, larger: Type | None, folder: Path) -> tuple[Model, float]:
    """All matrices of one type, or those that mixtures keep more exactly of a ``larger`` one."""

    def type_of(name: str) -> Type:
        keeps = larger is not None and any(part in name for part in ("attn_v", "ffn_down", "token_embd", "output."))
        chosen = larger if keeps and larger is not None else kind
        return FALLBACK.get(chosen, chosen) if "ffn_down" in name else chosen

    file = write_gguf(SHIPPED_MODEL, folder / f"{kind.name}-{larger}.gguf", type_of, random_blocks=False)
    tensors = read_header(file).tensors.values()
    layers = [tensor for tensor in tensors if tensor.name.startswith("blk.") and len(tensor.shape) == 2]
    bits = 8 * sum(tensor.num_bytes for tensor in layers) / sum(prod(tensor.shape) for tensor in layers)
    return model_of(file), bits


def read_text() -> list[Sample]:
    """As it lies beside this file."""
    return [(list(ids), int(start)) for ids, start in json.loads(TEXT.read_text())]


@torch.inference_mode()
def logits(model: Model, samples: list[Sample]) -> torch.Tensor:
    """Of all tokens of the answers, [T, V] float32."""
    dtype = model.parameters.dtype
    return torch.cat([logits_of(model, ids, dtype)[start - 1 : -1] for ids, start in samples])


def tokens_of(samples: list[Sample]) -> torch.Tensor:
    """All tokens of the answers, [T]."""
    return torch.cat([torch.tensor(ids[start:]) for ids, start in samples])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="sample the text anew")
    if parser.parse_args().write:
        TEXT.write_text(json.dumps(texts(len(WORDS), 60)) + "\n")
    samples = read_text()
    truth = logits(model_of(SHIPPED_MODEL), samples)
    print(f"{len(samples)} answers, {len(truth)} tokens\n")
    print("| weights | bits | logit error | other choice | divergence | perplexity |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for each in formats():
            model, bits = each.load(Path(folder))
            found = compare(logits(model, samples), truth, tokens_of(samples))
            print(
                f"| {each.name} | {bits:.3g} | {found.logit_error:.4f} | {found.other_choice:.2%} "
                f"| {found.divergence:.5f} | {found.perplexity:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
