"""What ``--quantization`` asks for beside what the checkpoint says."""

from __future__ import annotations

from dataclasses import replace

from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.quantization.parsing import METHODS, method_of
from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.actors.settings import Settings

ONLINE = {
    "fp8": Scheme("online", "e4m3", 8, (1, 0), activations="dynamic"),
    "int8": Scheme("online", "int8", 8, (1, 0), activations="dynamic"),
    "int4": Scheme("online", "uint4", 4, (1, 128), zeros=True),
}
"""What weights of a checkpoint without quantization can be made at load."""


def with_quantization(settings: Settings, config: ModelConfig) -> ModelConfig:
    """The configuration with the quantization that is wanted: the checkpoint's own, or one that is made at load.

    Raises:
        ModelError: the checkpoint has another, or has none and this one cannot be made.
    """
    if settings.quantization is None:
        return config
    asked, own = method_of(settings.quantization), config.quantization
    if own is not None:
        if own.method != asked:
            raise ModelError(
                f"--quantization {settings.quantization}: the checkpoint is quantized by {own.method}; "
                "leave the flag out to take that"
            )
        return config
    if asked in ONLINE:
        return replace(config, quantization=Quantization(asked, ONLINE[asked], online=True))
    known = f", {asked} only as a checkpoint has it" if asked in METHODS else ""
    raise ModelError(
        f"--quantization {settings.quantization}: the checkpoint is not quantized, and only {', '.join(ONLINE)} "
        f"are made at load{known}"
    )
