"""How far log probabilities over caches of several formats are from those of a model in float32: random weights, a long
random prompt in chunks, and its last tokens one by one.

    python -m tests.gpu.engine.cache_error [--tokens 9500] [--layers 4] [--hidden 1024] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention import attention_shape
from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.loading.kv_scales import calculate_scales
from pagebus.actors.executor.memory.kv_cache import allocate_kv_cache, is_float8
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.attention.paged_attention import Spans, cut_prompts

BLOCK_SIZE, CHUNK, DECODES, MEASURED = 16, 1024, 32, 512
GAIN = 1.6
"""Of a random matrix: what the reference models of the tests have."""
CACHES = {
    "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8
}  # fmt: skip


def make_config(hidden: int, layers: int, longest: int) -> ModelConfig:
    """A small Llama whose heads are as those of Llama-3.1-8B."""
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": hidden,
        "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(1, hidden // 512), "head_dim": 128, "max_position_embeddings": longest,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields))
        return ModelConfig.load(Path(folder))


class Subject:
    """A model in one format over a cache in another. All have the same weights, but rounded to ``dtype``."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype, tokens: int, device: torch.device
    ) -> None:
        self._ops, self._device, self.dtype = Ops.for_device(device), device, dtype
        self.model: Model = build_model(config, device, dtype, self._ops, tokens, cache_dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode():
            for tensor in self.model.parameters.tensors:
                random = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.2 * random if tensor.dim() == 1 else random * GAIN * tensor.shape[1] ** -0.5)
            if is_float8(cache_dtype):
                for layer, scales in zip(self.model.layers, calculate_scales(self.model), strict=True):
                    layer.attention.kv_scales.copy_(scales)
        self._shape = attention_shape(config, dtype, cache_dtype)
        num_blocks = -(-tokens // BLOCK_SIZE)
        self._cache = allocate_kv_cache(config, num_blocks, BLOCK_SIZE, cache_dtype, device)
        order = torch.randperm(num_blocks, generator=generator)
        self._table = order.int().unsqueeze(0).to(device)

    @torch.inference_mode()
    def log_probabilities(self, ids: torch.Tensor) -> torch.Tensor:
        """Of the last tokens of ``ids`` [T]: MEASURED of them read in chunks, then DECODES one by one."""
        count, found = len(ids), []
        ends = [*range(CHUNK, count - DECODES, CHUNK), *range(count - DECODES, count)]
        for start, end in zip([0, *ends], ends, strict=False):
            logits = self.model.logits(self._pass(ids, start, end)[-MEASURED:]).float().log_softmax(1)
            following = ids[start + 1 : end + 1][-len(logits) :].long().to(self._device)
            found.append(logits.gather(1, following.unsqueeze(1)).squeeze(1).cpu())
        return torch.cat(found)[-MEASURED - DECODES :]

    def _pass(self, ids: torch.Tensor, start: int, end: int) -> torch.Tensor:
        decode, places = end - start == 1, torch.arange(start, end, device=self._device)
        words: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        starts, lens = np.array([0, end - start], np.int32), np.array([end], np.int32)
        cut = None if decode else cut_prompts(starts, lens, 0, self._shape, self._device)
        batch = AttentionBatch(
            slots=torch.zeros(1, **words), query_start=torch.tensor([0, end - start], **words),
            context_lens=torch.tensor([end], **words),
            slot_mapping=self._table[0, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE,
            block_tables=self._table, num_decodes=int(decode),
            spans=None if cut is None else Spans.copied(cut, self._device),
        )  # fmt: skip
        return self.model.forward(ids[start:end].int().to(self._device), places.int(), self._cache, batch)


def measure(
    tokens: int, hidden: int, layers: int, device: torch.device, names: Sequence[str] = tuple(CACHES)
) -> dict[str, dict[str, float]]:
    """The mean distance of log probabilities from float32's, and their greatest, of prompts and of decodes."""
    config = make_config(hidden, layers, tokens + 1)
    ids = torch.randint(config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
    exact = Subject(config, torch.float32, torch.float32, tokens, device).log_probabilities(ids)
    rows = {}
    for name in names:
        began = time.perf_counter()
        error = (Subject(config, torch.bfloat16, CACHES[name], tokens, device).log_probabilities(ids) - exact).abs()
        rows[name] = {
            "mean": float(error.mean()), "decodes": float(error[-DECODES + 1 :].mean()), "most": float(error.max())
        }  # fmt: skip
        seconds = time.perf_counter() - began
        print(f"{name:10} {'  '.join(f'{key} {value:.4f}' for key, value in rows[name].items())} ({seconds:.1f} s)",
              flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=9500)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    measure(options.tokens, options.hidden, options.layers, torch.device(options.device))


if __name__ == "__main__":
    main()
