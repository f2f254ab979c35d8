"""A model's folder and its configuration, from ``config.json`` and ``generation_config.json``.

Every actor reads it: the ingress checks token ids against the vocabulary, the scheduler needs end tokens and the
longest length, and the executor builds the model. So this module imports neither torch nor transformers. Both dialects
of the files are read: ``torch_dtype``, ``rope_theta`` and ``rope_scaling`` of transformers 4, ``dtype`` and
``rope_parameters`` of 5. A feature that Pagebus cannot compute exactly is rejected by name, never approximated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagebus.actors import shipped_model
from pagebus.actors.model import ropes
from pagebus.actors.model.cache_groups import CacheGroups, cache_groups
from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.families.registry import ARCHITECTURES, family_of, text_fields
from pagebus.actors.model.family import NameMap, without_layers
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.generation import default_sampling, end_token_ids, tokenizer_end
from pagebus.actors.model.gguf.configuration import describe
from pagebus.actors.model.gguf.files import choose, file_of, is_gguf, read_file, split_type
from pagebus.actors.model.pooling.heads import pooled_spec, tokens_between
from pagebus.actors.model.pooling.modules import Modules, read_modules
from pagebus.actors.model.pooling.pooler import Pooler
from pagebus.actors.model.quantization.parsing import parse_quantization, quantization_fields
from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.shards.shard import Shard
from pagebus.actors.model.shards.stage import Stage, stage_groups
from pagebus.actors.model.spec import Mla, ModelSpec
from pagebus.actors.settings import Settings

__all__ = ["ARCHITECTURES", "ModelConfig", "ModelError"]

DTYPES = ("float32", "bfloat16", "float16")
SHIPPED_MODEL = Path(shipped_model.__file__).parent

QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where ModelOpt, AutoGPTQ and AWQ kept what config.json has today."""
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors",)
COPIES = ("consolidated*", "original/*")
"""Of the same weights in their authors' own formats: Mistral's, and those of gpt-oss."""
CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's shape and its defaults: what ``spec`` says of every layer, where all layers are alike in it.

    ``layer_windows`` has one entry per layer: the number of latest tokens, itself included, that a token attends to,
    or 0 for all; of chunks, minus their length. ``intermediate_size`` is the width of a dense feed-forward part.
    ``names`` finds the weights.
    """

    architecture: str
    spec: ModelSpec
    names: NameMap
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layer_windows: tuple[int, ...]
    tie_word_embeddings: bool
    attention_out_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float]
    quantization: Quantization | None = None
    """Of the weights in the files; None: they are not quantized."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """Numbers of embeddings that the model was trained to be cut to; empty: it does not say."""
    pooler: Pooler | None = None
    """What the model makes of prompts in place of generating; None: it generates."""
    reasoning_parser: str = ""
    """The format of its reasoning, where its architecture says it."""
    shard: Shard | None = None
    """Of which model this is one rank's part; None: it is a whole one. Heads and widths are the part's."""
    stage: Stage | None = None
    """Of a pipeline: which layers of the model these are; ``layer_windows`` are those of all of its layers."""
    grouped: bool = False
    """Whether layers with windows have pages of their own in the cache, where others have none."""
    num_mtp_layers: int = 0
    """Layers of the checkpoint that guess tokens after the next; they are none of the ``num_layers``."""
    model_max_length: int = 0
    """Positions that may be asked for, where ``max_position_embeddings`` are fewer (Command R); 0: it does not say."""

    @property
    def latent(self) -> Mla | None:
        """The mixer of all layers if it is latent attention, else None. ``num_kv_heads`` is then 1, and ``head_dim``
        what a token has in the cache."""
        mixer = self.spec.layers[0].mixer
        return mixer if isinstance(mixer, Mla) else None

    @property
    def sliding_window(self) -> int | None:
        """The largest window that occurs, or None."""
        return max(self.layer_windows) or None

    @property
    def kept_window(self) -> int:
        """How many tokens, the newest included, some layer may still read; 0: all, as a layer has no window. Chunks
        count as windows of their length."""
        reaches = [abs(reach) for reach in self.layer_windows]
        return max(reaches) if reaches and all(reaches) and not self.in_one_step else 0

    @property
    def cache_groups(self) -> CacheGroups:
        """Which layers share a page of the cache: all, unless they are ``grouped``."""
        apart = self.grouped and not self.in_one_step
        groups = cache_groups(self.layer_windows if apart else (0,) * len(self.layer_windows))
        return groups if self.stage is None else stage_groups(groups, self.layer_windows, self.stage.layers)

    @property
    def in_one_step(self) -> bool:
        """Whether prompts have to be computed whole: all their tokens see each other, and nothing is cached."""
        return self.spec.encoder is not None

    @classmethod
    def of(cls, settings: Settings, path: Path | None = None) -> ModelConfig:
        """That of the model that is served, which lies at ``path`` if somebody has found it. Raises ModelError."""
        tokenizer = resolve_tokenizer(settings) if settings.tokenizer and settings.has_tokenizer else None
        return cls.load(path or resolve_model(settings, weights=False), settings.classifier_from_token, tokenizer)

    @classmethod
    def load(
        cls, path: Path, classifier_from_token: tuple[str, ...] = (), tokenizer: Path | None = None
    ) -> ModelConfig:
        """Read ``path/config.json`` and, if they are there, ``path/generation_config.json``, the tokenizer's end token
        and the files of sentence-transformers; or the one GGUF file that ``path`` is. ``classifier_from_token``: the
        setting. ``tokenizer``: its folder, if it is another.

        Raises:
            ModelError: a file is missing or broken, or the model is one that Pagebus does not compute.
        """
        words = tokenizer or path
        if is_gguf(path):
            if classifier_from_token:
                raise ModelError("--classifier-from-token: not supported for GGUF files")
            return _of_gguf(path, tokenizer_end(words))
        side = next((read_json(path / name) for name in QUANTIZATION_FILES if (path / name).is_file()), {})
        raw, generation = read_json(path / "config.json"), read_json(path / "generation_config.json", optional=True)
        between = tokens_between(words, raw, classifier_from_token)
        return parse_config(raw, generation, read_modules(path), between, side, tokenizer_end(words))


def _of_gguf(path: Path, ends: tuple[int, ...]) -> ModelConfig:
    """The configuration in a GGUF file. Raises ModelError."""
    said = describe(read_file(path))
    config = parse_config(said.fields, said.generation, ends=ends)
    return replace(config, spec=said.as_stored(config.spec), quantization=said.quantization)


def max_positions(config: ModelConfig) -> int:
    """The most positions that may be asked for: those of the first training, stretched, or what the model says."""
    found = [ropes.max_positions(rope, config.max_position_embeddings) for rope in config.spec.rope]
    return max(*found, config.max_position_embeddings, config.model_max_length)


def default_positions(config: ModelConfig) -> int:
    """As many as it has without other angles for prompts of all lengths."""
    found = [ropes.default_positions(rope, config.max_position_embeddings) for rope in config.spec.rope]
    return max(found, default=config.max_position_embeddings)


def num_layer_weights(config: ModelConfig) -> int:
    """Of the matrices of all layers: what every token is multiplied with, besides the head's."""
    return config.spec.layer_weights()


def effective_max_model_len(settings: Settings, config: ModelConfig) -> int:
    """Longest prompt plus output in tokens: what ``--max-model-len`` asks for, else all the model has positions for
    without angles of its own for long prompts.

    Raises:
        ModelError: more is asked for than the model has positions.
    """
    longest = max_positions(config)
    if settings.max_model_len is None:
        trained = config.pooler.most_tokens if config.pooler is not None else None
        length = min(default_positions(config), trained or longest)
    elif settings.max_model_len > longest:
        raise ModelError(f"--max-model-len {settings.max_model_len}: the model has only {longest} positions")
    else:
        length = settings.max_model_len
    if config.in_one_step:
        length = min(length, settings.max_num_batched_tokens or length, settings.max_num_scheduled_tokens or length)
    return length


def planned_model_len(settings: Settings, config: ModelConfig) -> int:
    """The longest prompt plus output that is planned for. A model that pools has place for a token that ends a request,
    but is never computed, behind the longest prompt."""
    return effective_max_model_len(settings, config) + (config.pooler is not None)


# --- where the folder lies --------------------------------------------------------------------------------------------


def resolve_model(settings: Settings, *, weights: bool = True) -> Path:
    """The model's folder: the shipped one for "", a local folder, else a snapshot of the hub's repository.

    ``weights=False`` fetches only the small files, without waiting for gigabytes. ``--load-format dummy`` never fetches
    weights.

    Raises:
        ModelError: there is no such folder, no such repository, no permission or no way to the hub.
    """
    if not settings.model:
        return SHIPPED_MODEL
    return resolve_folder(settings.model, settings.revision, weights=weights and settings.load_format != "dummy")


def resolve_tokenizer(settings: Settings) -> Path:
    """The folder with the tokenizer files: ``--tokenizer``'s if given, else the model's. Raises ModelError."""
    if settings.tokenizer is None:
        return resolve_model(settings, weights=False)
    return resolve_folder(settings.tokenizer, None, weights=False, what="tokenizer")


def resolve_folder(name: str, revision: str | None, *, weights: bool, what: str = "model") -> Path:
    """A local folder or GGUF file as it is, a hub id as a (downloaded or cached) snapshot. If the model of a folder or
    snapshot is a GGUF file, that file, with the type behind the colon if there is one. Raises ModelError."""
    local = Path(name).expanduser()
    if local.is_file():
        if is_gguf(local):
            return local
        raise ModelError(
            f"{what} {name!r} is a file: give the folder with config.json and the safetensors files, or a .gguf file"
        )
    base, kind = (name, "") if local.is_dir() else split_type(name)
    folder = Path(base).expanduser()
    if folder.is_dir():
        return _model_in(folder, kind)
    if base.startswith(("/", ".", "~")) or base.count("/") > 1:
        raise ModelError(f"{what} {name!r}: there is no such folder")
    if kind:
        return _download_gguf(base, revision, kind)
    found = snapshot(base, revision, SMALL_FILES + WEIGHT_FILES if weights else SMALL_FILES, what)
    return found if (found / CONFIG_FILE).is_file() else _download_gguf(base, revision, "", found)


def _model_in(folder: Path, kind: str) -> Path:
    """The folder itself, or the GGUF file that is its model. Raises ModelError."""
    own = not kind and (folder / CONFIG_FILE).is_file() and any(folder.glob(WEIGHT_FILES[0]))
    found = None if own else file_of(folder, kind)
    if kind and found is None:
        raise ModelError(f"model '{folder}:{kind}': the folder has no GGUF file")
    return found or folder


def _download_gguf(name: str, revision: str | None, kind: str, without: Path | None = None) -> Path:
    """The GGUF file of a type, or the only one, of a repository; ``without`` if it has none."""
    chosen = choose(hub_files(name, revision, kind), kind, name)
    if chosen is None:
        if without is not None:
            return without
        raise ModelError(f"model '{name}:{kind}': the repository has no GGUF file")
    parts = re.sub(r"-00001-of-(\d{5})\.gguf$", r"-?????-of-\1.gguf", chosen)
    return snapshot(name, revision, (parts,)) / chosen


def hub_files(name: str, revision: str | None, kind: str) -> list[str]:
    """GGUF files of a repository: of the hub, or those in the cache where it cannot be reached."""
    import huggingface_hub

    try:
        listed = huggingface_hub.HfApi().list_repo_files(name, revision=revision)
        return [each for each in listed if is_gguf(Path(each))]
    except Exception:  # offline, or it is not there: what is cached says which
        folder = snapshot(name, revision, (f"*{kind}*.gguf",))
        return [str(each.relative_to(folder)) for each in folder.rglob("*.gguf")]


def snapshot(name: str, revision: str | None, patterns: tuple[str, ...], what: str = "model") -> Path:
    """Files of a repository of the hub, with what is cached already. Errors of the hub's library become one ModelError,
    which says ``what`` was requested."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        wanted = {"allow_patterns": list(patterns), "ignore_patterns": list(COPIES)}
        return Path(huggingface_hub.snapshot_download(name, revision=revision, **wanted))
    except errors.HFValidationError as error:
        raise ModelError(f"{what} {name!r} is neither a folder nor an id of the Hugging Face hub") from error
    except errors.GatedRepoError as error:
        raise ModelError(f"{what} {name!r} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        text = "no such folder and no such repository on the hub (or no access)"
        raise ModelError(f"{what} {name!r}: {text}") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{what} {name!r} has no revision {revision!r} on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        why = "the hub is off (HF_HUB_OFFLINE)" if huggingface_hub.constants.HF_HUB_OFFLINE else "no hub reached"
        raise ModelError(f"{what} {name!r}: no such folder, not in the local cache, and {why}") from error
    except Exception as error:  # whatever the HTTP library raises: connection, proxy, disk full
        raise ModelError(f"{what} {name!r} could not be fetched: {type(error).__name__}: {error}") from error


# --- reading the files ------------------------------------------------------------------------------------------------


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; ``{}`` if it is optional and not there. Raises ModelError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if optional:
            return {}
        raise ModelError(f"{path}: no such file, so this is not a Hugging Face model folder") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], modules: Modules | None = None,
    between: tuple[int, int] | None = None, quantization: Mapping[str, Any] | None = None, ends: tuple[int, ...] = (),
) -> ModelConfig:  # fmt: skip
    """The files' objects as a :class:`ModelConfig`, with the defaults that transformers has. ``modules`` and
    ``between``: as in :func:`~pagebus.actors.model.pooling.heads.pooler_of`. ``quantization``: of one of
    `QUANTIZATION_FILES`. ``ends``: end tokens that the tokenizer's files name. Raises ModelError."""
    family = family_of(raw)
    fields = Fields(text_fields(raw, family))
    spec, names, pooler = pooled_spec(family, fields, _architecture(raw), modules, between)
    guessing = fields.get("num_nextn_predict_layers") or 0
    mixer, feed = spec.layers[0].mixer, spec.layers[0].feed
    if len({(layer.mixer.heads, layer.mixer.kv_heads, layer.mixer.head_dim) for layer in spec.layers}) > 1:
        raise ModelError("config.json: layers that differ in their heads are not supported")
    return ModelConfig(
        architecture=_architecture(raw),
        spec=spec,
        names=without_layers(names, len(spec.layers), guessing),
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=feed.width,
        num_layers=len(spec.layers),
        num_heads=mixer.heads,
        num_kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        max_position_embeddings=_positions(fields, spec),
        layer_windows=tuple(layer.mixer.reach for layer in spec.layers),
        tie_word_embeddings=spec.head.tied,
        attention_out_bias=mixer.out_bias,
        mlp_bias=feed.bias,
        dtype=_dtype(fields.raw),
        eos_token_ids=end_token_ids(generation, fields.raw, spec.vocab, (*ends, *family.end_tokens)),
        default_sampling=default_sampling(generation),
        quantization=parse_quantization(quantization_fields(fields), quantization or {}),
        matryoshka_dimensions=_matryoshka_dimensions(raw),
        pooler=pooler,
        reasoning_parser=family.reasoning,
        num_mtp_layers=guessing,
        model_max_length=_model_max_length(fields, spec),
    )


def _positions(fields: Fields, spec: ModelSpec) -> int:
    """Tokens of the longest prompt. An encoder's table may begin with rows that no token has."""
    encoder = spec.encoder
    return fields.integer("max_position_embeddings") if encoder is None else encoder.positions - encoder.first


def _model_max_length(fields: Fields, spec: ModelSpec) -> int:
    """Only angles can be made for any number of positions. Files may have an absurd number in place of none."""
    given = fields.get("model_max_length")
    return given if type(given) is int and 0 < given < 2**31 and spec.rope else 0


def _matryoshka_dimensions(raw: Mapping[str, Any]) -> tuple[int, ...]:
    given = raw.get("matryoshka_dimensions") or []
    if not isinstance(given, list) or any(type(each) is not int or each < 1 for each in given):
        raise ModelError("config.json: matryoshka_dimensions must be a list of numbers from 1 on")
    return tuple(given)


def _architecture(raw: Mapping[str, Any]) -> str:
    """The first that the file names."""
    names = raw["architectures"]
    return str(names[0] if isinstance(names, list) else names)


def _dtype(raw: Mapping[str, Any]) -> str:
    """Number format of the stored weights; files that do not say mean float32."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(DTYPES)})")
    return name
