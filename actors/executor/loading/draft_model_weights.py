"""Builds small models that draft for others, and fills them from folders of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pagebus.actors.executor.layers.attention import attention_shape
from pagebus.actors.executor.layers.sharded.sums import ops_beside
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.executor.models.decoder import as_decoder
from pagebus.actors.executor.models.draft_model import DraftModel
from pagebus.actors.model.config import ModelConfig, ModelError, resolve_folder
from pagebus.actors.model.shards.local import local_config
from pagebus.actors.model.spec import Gqa, Moe
from pagebus.actors.settings import Settings
from pagebus.kernels.attention.paged_attention import prompts_config
from pagebus.kernels.common.triton import next_power_of_2

SHORT, LONG = (0, 0), (1 << 20, 1 << 20)
"""New tokens and context of prompts for which launch shapes may differ."""


@dataclass(frozen=True, slots=True)
class DraftModelFiles:
    """A draft model that has not been read yet. ``cached``: its configuration, with what it has in the cache."""

    path: Path
    cached: ModelConfig

    def build(self, model: Model, settings: Settings, *, with_weights: bool = True) -> DraftModel:
        """The draft model for ``model``, on its device and in its format. Random weights if the model has such, none if
        not ``with_weights``.

        Raises:
            ModelError: its tensors are missing, or not what its config.json says, or it cannot attend beside the model.
        """
        device, dtype = model.parameters.device, model.parameters.dtype
        ops = ops_beside(as_decoder(model).ops, device)
        built = build_model(
            self.cached, device, dtype, ops, model.num_positions, backend=settings.attention_backend
        )  # fmt: skip
        try:
            if device.type != "cpu":
                _check_kernels(built, model)
            if with_weights and device.type != "meta":
                load_weights(built, self.path, settings.load_format, settings.seed, lambda share: None)
        except ModelError as error:
            raise ModelError(f"speculative model {self.path}: {error}") from error
        return DraftModel(as_decoder(built))


def draft_model_files(settings: Settings, target: ModelConfig) -> DraftModelFiles:
    """Those of ``--spec-model``, to draft for ``target``; of a rank's part of that, the rank's part. Raises ModelError
    if they cannot."""
    assert settings.spec_model is not None
    path = resolve_folder(settings.spec_model, None, weights=settings.load_format != "dummy")
    try:
        config = ModelConfig.load(path)
        _check(config, target)
        if target.shard is not None:
            config = local_config(config, target.shard.rank, target.shard.world)
    except ModelError as error:
        raise ModelError(f"speculative model {path}: {error}") from error
    return DraftModelFiles(path, _beside(config, target))


def _check(draft: ModelConfig, target: ModelConfig) -> None:
    """Raises ModelError for a model that cannot draft for the ``target``."""
    if target.latent is not None:
        raise ModelError(f"draft models for {target.architecture}, which has latent attention, are not supported")
    if draft.pooler is not None or draft.in_one_step:
        raise ModelError(f"{draft.architecture} does not generate")
    if draft.vocab_size != target.vocab_size:
        raise ModelError(
            f"target and draft model should have the same vocabulary size: it has {draft.vocab_size} tokens, the model "
            f"{target.vocab_size}"
        )
    if draft.latent is not None or any(isinstance(layer.feed, Moe) for layer in draft.spec.layers):
        raise ModelError(f"{draft.architecture} is not supported as a draft model (only dense decoders)")
    if draft.quantization is not None:
        raise ModelError("quantized draft models are not supported")
    if target.kept_window and any(reach < 0 for reach in draft.layer_windows):
        raise ModelError(f"{draft.architecture} attends in chunks, and the cache of the model keeps a window only")


def _beside(draft: ModelConfig, target: ModelConfig) -> ModelConfig:
    """The ``draft`` as it is beside the ``target``: all its layers lie in one page, and see no further back than the
    cache of the target reaches."""
    kept, layers = target.kept_window, []
    for layer in draft.spec.layers:
        mixer = layer.mixer
        assert isinstance(mixer, Gqa)
        seen = min(mixer.window or kept, kept) if kept else mixer.window
        layers.append(replace(layer, mixer=replace(mixer, window=seen)))
    reaches = tuple(layer.mixer.reach for layer in layers)
    return replace(draft, spec=replace(draft.spec, layers=tuple(layers)), layer_windows=reaches, grouped=False)


def _check_kernels(draft: Model, model: Model) -> None:
    """Whether prompts that are cut for the attention of the ``model`` may be attended by the ``draft`` so. Raises
    ModelError."""
    ours, its = (
        attention_shape(each.config, each.parameters.dtype, each.chooser.setup.cache_dtype, each.parameters.device)
        for each in (draft, model)
    )
    alike = all(ours.prompts(*size) == its.prompts(*size) for size in (SHORT, LONG))
    if not alike and next_power_of_2(ours.head_dim) > next_power_of_2(its.head_dim):
        raise ModelError(f"its heads have {ours.head_dim} numbers, those of the model only {its.head_dim}")
    if ours.q_heads > its.q_heads:
        raise ModelError(f"it has {ours.q_heads} heads, the model only {its.q_heads}")
    group = ours.q_heads // ours.kv_heads
    if model.chooser.setup.deterministic and group > prompts_config(its, invariant=True).heads:
        raise ModelError(f"--deterministic: {group} of its heads share keys, more than of the model's")
    backends = draft.chooser.long_prompts, model.chooser.long_prompts
    if not model.chooser.setup.deterministic and len(set(backends)) > 1:
        named = [backend or "prefill" for backend in backends]
        raise ModelError(f"long prompts would take another kernel in it ({named[0]}) than in the model ({named[1]})")
