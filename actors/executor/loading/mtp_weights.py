"""Builds the layer of a checkpoint that guesses further tokens, and fills it from the model's own files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pagebus.actors.executor.loading.weight_copy import StoredTensor
from pagebus.actors.executor.loading.weights import load_weights, read_headers, weight_files
from pagebus.actors.executor.models import Model
from pagebus.actors.executor.models.decoder import as_decoder
from pagebus.actors.executor.models.mtp import EMBEDDING, HEAD, Mtp
from pagebus.actors.executor.models.mtp_config import mtp_layer, mtp_prefix
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.gguf.files import is_gguf
from pagebus.actors.settings import Settings

TIED_TO = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
"""Of which tensors of the model checkpoints may have copies beside the layer."""


@dataclass(frozen=True, slots=True)
class MtpFiles:
    """The layer of the model in ``path``, which has not been read yet. ``cached``: what it has in the cache."""

    path: Path
    model: ModelConfig
    cached: ModelConfig

    def build(self, model: Model, settings: Settings, *, with_weights: bool = True) -> Mtp:
        """The layer, on the device and in the format of ``model``. Random weights if the model has such, none if not
        ``with_weights``.

        Raises:
            ModelError: its tensors are missing, or not what config.json says.
        """
        with_weights = with_weights and settings.load_format != "dummy"
        prefix, own, copies = mtp_prefix(self.model), set[str](), set[str]()
        if with_weights:
            stored = read_headers(weight_files(self.path))
            for name, of_model in TIED_TO.items():
                tensor, its = stored.get(f"{prefix}.{name}.weight"), stored.get(of_model)
                if tensor is not None:
                    (copies if its is not None and _equal(tensor, its) else own).add(name)
        names = self.cached.names
        names = replace(names, skip=(*names.skip, *(f"{prefix}.{name}." for name in copies)))
        layer = Mtp(replace(self.cached, names=names), prefix, as_decoder(model), own)
        if model.parameters.device.type != "meta":
            load_weights(layer, self.path, settings.load_format, settings.seed, lambda share: None)
        return layer


def mtp_files(config: ModelConfig, path: Path) -> MtpFiles:
    """Of the model in ``path``. Raises ModelError if it has no such layer."""
    if is_gguf(path):
        raise ModelError("--spec-method mtp: not supported for GGUF files")
    return MtpFiles(path, config, mtp_layer(config))


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are the same, number by number."""
    if (one.format, one.shape) != (other.format, other.shape):
        return False
    first, second = (np.memmap(each.file, np.uint8, "r", each.offset, (each.num_bytes,)) for each in (one, other))
    return np.array_equal(first, second)
