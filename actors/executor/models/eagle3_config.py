"""EAGLE-3 heads (https://arxiv.org/abs/2503.01840) as their ``config.json`` describes them, in both formats that there
are: that of the ``speculators`` library, and that of SafeAILab, which SpecForge and others write too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagebus.actors.model.config import CONFIG_FILE, ModelConfig, parse_config, read_json
from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.shards.cuts import Cut, cut_of
from pagebus.actors.model.shards.local import local_config
from pagebus.actors.model.shards.shard import Shard

LAYERS_FIELD = "eagle_aux_hidden_state_layer_ids"
LLAMA = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """A head for one model. ``layer``: its sizes, as those of a Llama of one layer. ``taps``: before which layers of
    the model its residual stream is read, ``target_hidden`` wide. Of the vocabulary the head knows ``draft_vocab``
    tokens.

    ``norm_before_fc``: what is read is normed as one before the first product, ``fc_norm``: each for itself.
    ``norm_before_residual``: the residual stream of the layer begins behind the norm of its feature. ``norm_output``:
    the next pass goes on with what is behind the last norm, not before it.
    """

    layer: ModelConfig
    taps: tuple[int, ...]
    target_hidden: int
    draft_vocab: int
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    @property
    def own_tokens(self) -> range:
        """Whose logits are computed here, by their numbers among those that the head knows; of a rank its part."""
        return range(self.draft_vocab) if self.layer.shard is None else self.layer.shard.of(self.draft_vocab)

    def cut_of(self, name: str) -> Cut | None:
        """What a rank takes of a tensor, by our name of it; None: the whole."""
        shard = self.layer.shard
        if shard is None:
            return None
        if name == "lm_head.weight":
            return Cut(0, self.draft_vocab, (self.own_tokens,))
        return cut_of(f"model.{name}", shard, self.layer.names)


def load_eagle3(path: Path, target: ModelConfig) -> Eagle3Config:
    """Read ``path/config.json`` of a head for ``target``; of a rank's part of that, the rank's part of the head.

    Raises:
        ModelError: it is no such head, or one for another model.
    """
    try:
        head = _parse(read_json(path / CONFIG_FILE), target)
        return head if target.shard is None else _part(head, target.shard)
    except ModelError as error:
        raise ModelError(f"speculative model {path}: {error}") from error


def _parse(raw: Mapping[str, Any], target: ModelConfig) -> Eagle3Config:
    inner = raw.get("transformer_layer_config")
    if inner is None:
        inner = raw
        if "draft_vocab_size" not in raw and "eagle3" not in "".join(map(str, raw.get("architectures") or ())).lower():
            raise ModelError("config.json is not one of an EAGLE-3 head: it has no draft_vocab_size")
    elif raw.get("speculators_model_type") != "eagle3" or not isinstance(inner, Mapping):
        raise ModelError(f"speculators_model_type {raw.get('speculators_model_type')!r} is not supported (only eagle3)")
    layer, more = _layer(inner, target), raw.get("eagle_config") or {}
    fields = Fields({**(more if isinstance(more, Mapping) else {}), **raw})
    if layer.vocab_size != target.vocab_size:
        raise ModelError(f"it is for a vocabulary of {layer.vocab_size} tokens, the model has {target.vocab_size}")
    target_hidden = fields.integer("target_hidden_size", layer.hidden_size)
    if target_hidden != target.hidden_size:
        raise ModelError(f"it is for hidden states of {target_hidden} numbers, the model has {target.hidden_size}")
    if more and fields.get("use_aux_hidden_state") is False:
        raise ModelError("use_aux_hidden_state false is not supported")
    return Eagle3Config(
        layer=layer,
        taps=_taps(raw, more, target.num_layers),
        target_hidden=target_hidden,
        draft_vocab=fields.integer("draft_vocab_size", layer.vocab_size),
        norm_before_fc=fields.flag("norm_before_fc"),
        fc_norm=fields.flag("fc_norm"),
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_output=fields.flag("norm_output"),
    )


def _part(head: Eagle3Config, shard: Shard) -> Eagle3Config:
    if head.draft_vocab < shard.world:
        raise ModelError(f"--tensor-parallel-size {shard.world}: it knows only {head.draft_vocab} tokens")
    return replace(head, layer=local_config(head.layer, shard.rank, shard.world))


def _layer(inner: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """The head's layer, which sees no further back than the cache of the model reaches."""
    fields = Fields(inner)
    if fields.get("model_type", "llama") != "llama":
        raise ModelError(f"a layer of model_type {fields.get('model_type')!r} is not supported (only llama)")
    if fields.integer("num_hidden_layers", 1) != 1:
        raise ModelError(
            f"num_hidden_layers is {fields.get('num_hidden_layers')}; only heads of one layer are supported"
        )
    if fields.get("quantization_config"):
        raise ModelError("quantized heads are not supported")
    llama = {"architectures": [LLAMA], "model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
    config = parse_config({**inner, **llama}, {})
    (layer,) = config.spec.layers
    mixer = replace(layer.mixer, window=target.kept_window)
    spec = replace(config.spec, layers=(replace(layer, mixer=mixer),))
    return replace(config, spec=spec, layer_windows=(mixer.reach,))


def _taps(raw: Mapping[str, Any], more: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """``speculators`` names the layers before which streams are read, the field within ``eagle_config`` those behind
    which they are. Without either they are those of the paper's code."""
    ids, behind = raw.get(LAYERS_FIELD), False
    if ids is None and more.get(LAYERS_FIELD) is not None:
        ids, behind = more[LAYERS_FIELD], True
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
    if not isinstance(ids, list) or not ids or not all(type(number) is int for number in ids):
        raise ModelError(f"config.json: {LAYERS_FIELD} is {ids!r}, not a list of whole numbers")
    taps = tuple(number + behind for number in ids)
    if not all(0 <= number < num_layers for number in taps):
        raise ModelError(
            f"it reads the hidden states before layers {', '.join(map(str, taps))}, the model has {num_layers} layers "
            f"({LAYERS_FIELD})"
        )
    return taps
