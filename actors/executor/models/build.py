"""From a configuration to a model without weights."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention import attention_shape
from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.passes import AttentionPasses
from pagebus.actors.executor.models.decoder import Decoder
from pagebus.actors.executor.models.encoder import Encoder
from pagebus.actors.executor.models.network import Network
from pagebus.actors.executor.models.oracle import OracleModel
from pagebus.actors.model.config import ModelConfig, default_positions
from pagebus.actors.model.oracle import ORACLE
from pagebus.actors.settings import SettingsError
from pagebus.kernels.attention.choice import AttentionChooser, AttentionSetup
from pagebus.kernels.common.target import target_of


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
    run: int = 1,
) -> Network:
    """A model with uninitialised tensors on ``device``; positions up to ``max_model_len`` (default: those of
    :func:`default_positions`), for a cache of ``cache_dtype`` (default: ``dtype``). ``backend``, ``deterministic`` and
    ``run``: as in :class:`AttentionSetup`.
    """
    num_positions = max_model_len or default_positions(config)
    cache_dtype = cache_dtype or dtype
    check_cache(config, dtype, cache_dtype)
    setup = AttentionSetup(
        target_of(device), dtype, cache_dtype, config.num_heads, config.num_kv_heads, config.head_dim,
        frozenset(config.layer_windows), backend, deterministic,
        softcap=any(layer.mixer.softcap for layer in config.spec.layers),
        sinks=any(layer.mixer.sinks for layer in config.spec.layers), latent=config.latent is not None,
        run=run,
    )  # fmt: skip
    chooser, parameters = AttentionChooser(setup), Parameters(device, dtype, config.quantization, config.names)
    if config.spec.encoder is not None:
        return Encoder(config, parameters, ops, chooser, num_positions)
    passes = AttentionPasses(ops, attention_shape(config, dtype, cache_dtype, device), chooser)
    model = OracleModel if config.architecture == ORACLE else Decoder
    return model(config, parameters, ops, passes, num_positions)


def check_cache(config: ModelConfig, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Raises SettingsError for a format in which no kernel reads latents."""
    if config.latent is not None and cache_dtype != dtype:
        raise SettingsError(
            f"--kv-cache-dtype {str(cache_dtype).removeprefix('torch.')}: {config.architecture} caches latents, which "
            "are kept in the model's own format and take less memory than one-byte keys and values would; use "
            "--kv-cache-dtype auto"
        )
