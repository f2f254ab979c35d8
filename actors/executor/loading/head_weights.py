"""Builds draft heads, and fills them from safetensors files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pagebus.actors.executor.layers.parameters import Parameters
from pagebus.actors.executor.layers.sharded.sums import ops_beside
from pagebus.actors.executor.loading.draft_model_weights import DraftModelFiles, draft_model_files
from pagebus.actors.executor.loading.mtp_weights import MtpFiles, mtp_files
from pagebus.actors.executor.loading.weight_copy import StoredTensor, copy_weights
from pagebus.actors.executor.loading.weights import check_tensors, fill_parameters, read_headers, weight_files
from pagebus.actors.executor.models import Model
from pagebus.actors.executor.models.decoder import as_decoder
from pagebus.actors.executor.models.eagle3 import Eagle3
from pagebus.actors.executor.models.eagle3_config import Eagle3Config, load_eagle3
from pagebus.actors.model.config import ModelConfig, ModelError, resolve_folder, resolve_model
from pagebus.actors.settings import Settings

EMBEDDING, OFFSETS, KNOWN = "embed_tokens.weight", "d2t", "t2d"
FOLDER = "eagle3"
"""Where the head of a model is, if not said otherwise: in this folder within its own."""
HEADS = ("eagle3", "mtp", "draft_model")
PREFIXES = (("model.", ""), ("midlayer.", "layers.0."))
"""How SafeAILab's format begins names, and ours."""
INTEGERS = {"I64": np.int64, "I32": np.int32}


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head that has not been read yet."""

    path: Path
    config: Eagle3Config

    @property
    def cached(self) -> ModelConfig:
        """What it has in the cache."""
        return self.config.layer

    def build(self, model: Model, settings: Settings, *, with_weights: bool = True) -> Eagle3:
        """The head of ``model``, on its device and in its format. Random weights if the model has such, none if not
        ``with_weights``.

        Raises:
            ModelError: tensors are missing, or not what the head's config.json says.
        """
        with_weights = with_weights and settings.load_format != "dummy"
        try:
            stored = _our_names(read_headers(weight_files(self.path))) if with_weights else {}
            return self._filled(model, settings, stored, with_weights=with_weights)
        except ModelError as error:
            raise ModelError(f"speculative model {self.path}: {error}") from error

    def _filled(
        self, model: Model, settings: Settings, stored: dict[str, StoredTensor], *, with_weights: bool
    ) -> Eagle3:
        decoder, embedding = as_decoder(model), None
        if EMBEDDING not in stored:
            embedding = decoder.embedding
            own, its = self.config.layer.hidden_size, embedding.weight.shape[1]
            if own != its:
                raise ModelError(f"it has no {EMBEDDING}, and that of the model has {its} columns, not {own}")
        parameters = Parameters(model.parameters.device, model.parameters.dtype)
        ops = ops_beside(decoder.ops, parameters.device)
        head = Eagle3(self.config, parameters, model.num_positions, ops, embedding)
        if with_weights:
            head.token_ids.copy_(torch.from_numpy(_token_ids(stored, self.config, model.config.vocab_size)))
            stored = {name: replace(tensor, cut=self.config.cut_of(name)) for name, tensor in stored.items()}
            check_tensors(stored, parameters.views)
            try:
                copy_weights([(stored[name], view) for name, view in parameters.views.items()], lambda count: None)
            except OSError as error:
                raise ModelError(f"the weights cannot be read: {error}") from error
        elif parameters.device.type != "meta":
            fill_parameters(parameters, settings.seed, self.config.layer.shard, self.config.cut_of)
        parameters.finish()
        return head


DraftFiles = HeadFiles | MtpFiles | DraftModelFiles


def head_files(settings: Settings, config: ModelConfig, model: Path | None = None) -> DraftFiles | None:
    """What the settings ask to draft, if it is a head or a model: the one they name, else the one in the folder of the
    ``model`` (default: that of the settings), or in its own files. Raises ModelError."""
    if settings.spec_method not in HEADS or config.pooler is not None:
        return None
    if settings.spec_method == "draft_model":
        return draft_model_files(settings, config)
    if settings.spec_method == "mtp":
        return mtp_files(config, model or resolve_model(settings, weights=False))
    if settings.spec_model is not None:
        path = resolve_folder(settings.spec_model, None, weights=True)
    else:
        path = (model or resolve_model(settings)) / FOLDER
        if not path.is_dir():
            raise ModelError(f"--spec-method eagle3: model (--spec-model) is missing, and there is no folder {path}")
    return HeadFiles(path, load_eagle3(path, config))


def _our_names(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Raises ModelError for two tensors of one name."""
    found: dict[str, StoredTensor] = {}
    for theirs, tensor in stored.items():
        name = theirs
        for prefix, ours in PREFIXES:
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
        if name in found:
            raise ModelError(f"tensor {name} is there twice, once as {theirs}")
        found[name] = tensor
    return found


def _token_ids(stored: dict[str, StoredTensor], config: Eagle3Config, vocab_size: int) -> np.ndarray:
    """The tokens that the head knows [draft_vocab] int32: their numbers there, plus the offsets that are ``stored``.
    Takes the tables of tokens out of it. Raises ModelError."""
    known, count = stored.pop(KNOWN, None), config.draft_vocab
    if known is not None and known.shape != (vocab_size,):
        raise ModelError(f"tensor {KNOWN} has shape {list(known.shape)}, the model's vocabulary is [{vocab_size}]")
    offsets, ids = stored.pop(OFFSETS, None), np.arange(count)
    if offsets is None and count != vocab_size:
        raise ModelError(f"it knows {count} of {vocab_size} tokens, and has no {OFFSETS} that says which")
    if offsets is not None:
        if offsets.shape != (count,) or offsets.format not in INTEGERS:
            given = f"{list(offsets.shape)} of {offsets.format}"
            raise ModelError(f"tensor {OFFSETS} is {given}, not [{count}] of {' or '.join(INTEGERS)}")
        ids = ids + np.fromfile(offsets.file, INTEGERS[offsets.format], count, offset=offsets.offset)
    if count and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ModelError(f"tensor {OFFSETS} names tokens beyond the model's vocabulary of {vocab_size}")
    return ids.astype(np.int32)
