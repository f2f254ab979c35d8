"""Which class computes which architecture."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention import attention_shape
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.passes import AttentionPasses
from pagebus.actors.executor.models.llama import LlamaModel
from pagebus.actors.executor.models.mistral import MistralModel
from pagebus.actors.executor.models.oracle import OracleModel
from pagebus.actors.executor.models.qwen2 import Qwen2Model
from pagebus.actors.executor.models.qwen3 import Qwen3Model
from pagebus.actors.model import config as model_config
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.kernels.attention.choice import AttentionChooser, AttentionSetup
from pagebus.kernels.common.target import target_of

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
    *,
    backend: str = "auto",
    deterministic: bool = False,
) -> LlamaModel:
    """A model with uninitialised tensors on ``device``; positions up to ``max_model_len`` (default: all it has), for a
    cache of ``cache_dtype`` (default: ``dtype``). ``backend`` and ``deterministic``: as in :class:`AttentionSetup`.

    Raises:
        ModelError: the architecture has no class here.
    """
    if config.architecture not in MODELS:
        supported = ", ".join(model_config.ARCHITECTURES)
        raise ModelError(f"architecture {config.architecture!r} is not supported (supported: {supported})")
    num_positions = max_model_len or model_config.max_positions(config)
    cache_dtype = cache_dtype or dtype
    setup = AttentionSetup(
        target_of(device), dtype, cache_dtype, config.num_heads, config.num_kv_heads, config.head_dim,
        frozenset(config.layer_windows), backend, deterministic,
    )  # fmt: skip
    passes = AttentionPasses(ops, attention_shape(config, dtype, cache_dtype), AttentionChooser(setup))
    return MODELS[config.architecture](config, Parameters(device, dtype), ops, passes, num_positions)
