"""Which class computes which architecture."""

from __future__ import annotations

from functools import partial

import torch

from actors import model_config
from actors.executor.layers.attention import KernelPass, attention_shape
from actors.executor.layers.cpu_attention import CpuPass, Scratch
from actors.executor.layers.parameters import Parameters
from actors.executor.models.llama import LlamaModel
from actors.executor.models.mistral import MistralModel
from actors.executor.models.oracle import OracleModel
from actors.executor.models.qwen2 import Qwen2Model
from actors.executor.models.qwen3 import Qwen3Model
from actors.executor.ops import Ops
from actors.model_config import ModelConfig, ModelError

MODELS: dict[str, type[LlamaModel]] = {
    model_config.LLAMA: LlamaModel,
    model_config.MISTRAL: MistralModel,
    model_config.QWEN2: Qwen2Model,
    model_config.QWEN3: Qwen3Model,
    model_config.ORACLE: OracleModel,
}


@torch.inference_mode()
def build_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    max_model_len: int | None = None,
    cache_dtype: torch.dtype | None = None,
) -> LlamaModel:
    """A model with uninitialised tensors on ``device``; positions up to ``max_model_len`` (default: all it has), for a
    cache of ``cache_dtype`` (default: ``dtype``).

    Raises:
        ModelError: the architecture has no class here.
    """
    if config.architecture not in MODELS:
        supported = ", ".join(model_config.ARCHITECTURES)
        raise ModelError(f"architecture {config.architecture!r} is not supported (supported: {supported})")
    num_positions = max_model_len or model_config.max_positions(config)
    shape = attention_shape(config, dtype, cache_dtype or dtype)
    in_place = device.type == "cpu" and dtype == (cache_dtype or dtype) == torch.float32
    begin = partial(CpuPass, ops, Scratch()) if in_place else partial(KernelPass, ops, shape)
    return MODELS[config.architecture](config, Parameters(device, dtype), ops, begin, num_positions)
