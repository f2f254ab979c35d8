"""A model's folder and its configuration, from ``config.json`` and ``generation_config.json``.

Every actor reads it: the ingress checks token ids against the vocabulary, the scheduler needs end tokens and the
longest length, and the executor builds the model. So this module imports neither torch nor transformers. Both dialects
of the files are read: ``torch_dtype``, ``rope_theta`` and ``rope_scaling`` of transformers 4, ``dtype`` and
``rope_parameters`` of 5. A feature that Pagebus cannot compute exactly is rejected by name, never approximated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagebus.actors import shipped_model
from pagebus.actors.settings import Settings

LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3)
ORACLE = "OracleForCausalLM"
"""A model for tests (:mod:`pagebus.actors.executor.models.oracle`)."""
ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SHIPPED_MODEL = Path(shipped_model.__file__).parent

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors",)


class ModelError(Exception):
    """A model that cannot be served; the text names the model and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's shape and its defaults. Counts are per layer where a layer has them.

    ``layer_windows`` has one entry per layer: the number of latest tokens, itself included, that a token attends to,
    or 0 for all. ``sliding_window`` is the one window that occurs in it, or None. ``rope_scaling`` is None for plain
    rotary embeddings, else it holds ``rope_type`` and that type's numbers.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    sliding_window: int | None
    layer_windows: tuple[int, ...]
    tie_word_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    hidden_act: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float]
    matryoshka_dimensions: tuple[int, ...] = ()
    """Numbers of embeddings that the model was trained to be cut to; empty: it does not say."""

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Read ``path/config.json`` and, if it is there, ``path/generation_config.json``.

        Raises:
            ModelError: a file is missing or broken, or the model is one that Pagebus does not compute.
        """
        return parse_config(read_json(path / "config.json"), read_json(path / "generation_config.json", optional=True))


def max_positions(config: ModelConfig) -> int:
    """Positions that the rotary embeddings are made for. Linear scaling stretches those of the first training."""
    scaling = config.rope_scaling
    if scaling is not None and scaling["rope_type"] == "linear":
        return math.floor(config.max_position_embeddings * float(scaling["factor"]))
    return config.max_position_embeddings


def num_layer_weights(config: ModelConfig) -> int:
    """Of the matrices of all layers: what every token is multiplied with, besides the head's."""
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    layer = hidden * (width + 2 * kv_width) + width * hidden + 3 * hidden * config.intermediate_size
    return layer * config.num_layers


def effective_max_model_len(settings: Settings, config: ModelConfig) -> int:
    """Longest prompt plus output in tokens: what ``--max-model-len`` asks for, else all the model has positions for.

    Raises:
        ModelError: more is asked for than the model has positions.
    """
    longest = max_positions(config)
    if settings.max_model_len is None:
        return longest
    if settings.max_model_len > longest:
        raise ModelError(f"--max-model-len {settings.max_model_len}: the model has only {longest} positions")
    return settings.max_model_len


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
    return resolve_folder(settings.tokenizer, None, weights=False)


def resolve_folder(name: str, revision: str | None, *, weights: bool) -> Path:
    """A local folder as it is, a hub id as a (downloaded or cached) snapshot. Raises ModelError."""
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise ModelError(f"model {name!r} is a file: give the folder that holds config.json and the safetensors files")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name!r}: there is no such folder")
    return _download(name, revision, SMALL_FILES + WEIGHT_FILES if weights else SMALL_FILES)


def _download(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """A snapshot from the hub, with what is cached already. Errors of the hub's library become one ModelError."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except errors.HFValidationError as error:
        raise ModelError(f"model {name!r} is neither a folder nor an id of the Hugging Face hub") from error
    except errors.GatedRepoError as error:
        raise ModelError(f"model {name!r} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"model {name!r}: no such folder and no such repository on the hub (or no access)") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"model {name!r} has no revision {revision!r} on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        why = "the hub is off (HF_HUB_OFFLINE)" if huggingface_hub.constants.HF_HUB_OFFLINE else "no hub reached"
        raise ModelError(f"model {name!r}: no such folder, not in the local cache, and {why}") from error
    except Exception as error:  # whatever the HTTP library raises: connection, proxy, disk full
        raise ModelError(f"model {name!r} could not be fetched: {type(error).__name__}: {error}") from error


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


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The two files' objects as a :class:`ModelConfig`, with the defaults that transformers has. Raises ModelError."""
    architecture = _architecture(raw)
    num_layers, num_heads = _integer(raw, "num_hidden_layers"), _integer(raw, "num_attention_heads")
    num_positions, vocab_size = _integer(raw, "max_position_embeddings"), _integer(raw, "vocab_size")
    rope_theta, rope_scaling = _rope(raw, num_positions)
    windows = _layer_windows(raw, architecture, num_layers)
    config_bias = bool(raw.get("attention_bias", False))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=_integer(raw, "hidden_size"),
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(raw, architecture, num_heads),
        head_dim=_head_dim(raw, architecture, num_heads),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=num_positions,
        sliding_window=max(windows) or None,
        layer_windows=windows,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=architecture == QWEN2 or (architecture in (LLAMA, QWEN3) and config_bias),
        attention_out_bias=architecture in (LLAMA, QWEN3) and config_bias,
        mlp_bias=architecture == LLAMA and bool(raw.get("mlp_bias", False)),
        hidden_act=str(raw.get("hidden_act", "silu")),
        dtype=_dtype(raw),
        eos_token_ids=_eos_token_ids(generation, raw, vocab_size),
        default_sampling=_default_sampling(generation),
        matryoshka_dimensions=_matryoshka_dimensions(raw),
    )
    if config.hidden_act != "silu":
        raise ModelError(f"config.json: hidden_act {config.hidden_act!r} is not supported (only silu)")
    return config


def _matryoshka_dimensions(raw: Mapping[str, Any]) -> tuple[int, ...]:
    given = raw.get("matryoshka_dimensions") or []
    if not isinstance(given, list) or any(type(each) is not int or each < 1 for each in given):
        raise ModelError("config.json: matryoshka_dimensions must be a list of numbers from 1 on")
    return tuple(given)


def _architecture(raw: Mapping[str, Any]) -> str:
    """The first architecture, if it is one of ours and nothing else in the file changes what it computes."""
    names = raw.get("architectures") or [None]
    name = names[0] if isinstance(names, list) else names
    if name not in (*ARCHITECTURES, ORACLE):
        said = f"architecture {name!r}" if name else "config.json names no architecture, which"
        raise ModelError(f"{said} is not supported (supported: {', '.join(ARCHITECTURES)})")
    if raw.get("auto_map"):
        raise ModelError("config.json: auto_map asks for code that comes with the model, which is never run")
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", "unnamed") if isinstance(method, dict) else method
        raise ModelError(f"config.json: quantization_config ({method}) is not supported")
    return str(name)


def _integer(raw: Mapping[str, Any], key: str) -> int:
    """A required whole number >= 1."""
    value = raw.get(key)
    if value is None:
        raise ModelError(f"config.json has no {key}")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ModelError(f"config.json: {key} is {value!r}, not a whole number of at least 1")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number > 0; required if there is no default."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"config.json has no {key}")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key} is {value!r}, not a number above 0")
    return float(value)


def _num_kv_heads(raw: Mapping[str, Any], architecture: str, num_heads: int) -> int:
    """Key and value heads. Older Llama files leave them out (or null) and mean as many as query heads."""
    if raw.get("num_key_value_heads") is None and (architecture == LLAMA or "num_key_value_heads" in raw):
        return num_heads
    num_kv_heads = _integer(raw, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
    return num_kv_heads


def _head_dim(raw: Mapping[str, Any], architecture: str, num_heads: int) -> int:
    """Width of a head: given, else hidden_size / heads; Qwen3's files that leave it out mean 128."""
    if raw.get("head_dim") is not None:
        head_dim = _integer(raw, "head_dim")
    elif architecture == QWEN3 and "head_dim" not in raw:
        head_dim = 128
    else:
        hidden_size = _integer(raw, "hidden_size")
        head_dim, rest = divmod(hidden_size, num_heads)
        if rest:
            raise ModelError(f"config.json: hidden_size {hidden_size} is not a multiple of {num_heads} heads")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd, rotary embeddings need pairs")
    return head_dim


def _rope(raw: Mapping[str, Any], num_positions: int) -> tuple[float, Mapping[str, Any] | None]:
    """Rotary base, and the scaling as a normalised dict or None."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise ModelError("config.json: rope_parameters and rope_scaling must be objects")
    said: dict[str, Any] = {**old, **new}
    theta = _number({"rope_theta": said.get("rope_theta", raw.get("rope_theta"))}, "rope_theta", 10000.0)
    partial = said.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise ModelError(f"config.json: partial_rotary_factor {partial} is not supported (only 1)")
    if any(isinstance(value, dict) for value in said.values()):
        raise ModelError("config.json: rope_parameters that differ by layer are not supported")
    rope_type = said.get("rope_type", said.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"config.json: rope type {rope_type!r} is not supported (supported: {', '.join(ROPE_TYPES)})")
    if rope_type == "default":
        return theta, None
    scaling: dict[str, Any] = {"rope_type": rope_type, "factor": _number(said, "factor")}
    if rope_type == "llama3":
        low, high = _number(said, "low_freq_factor"), _number(said, "high_freq_factor")
        if low >= high:
            raise ModelError(f"config.json: rope low_freq_factor {low} is not below high_freq_factor {high}")
        original = _number(said, "original_max_position_embeddings", float(num_positions))
        scaling |= {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return theta, scaling


def _layer_windows(raw: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int, ...]:
    """Attention window of each layer, 0 for none. Mistral: all layers; Qwen: those that it lists; Llama: none."""
    if architecture == MISTRAL:
        if raw.get("sliding_window", 4096) is None:
            return (0,) * num_layers
        return (_integer({"sliding_window": 4096, **raw}, "sliding_window"),) * num_layers
    if architecture == LLAMA:
        return (0,) * num_layers
    window = 0
    if raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None:
        window = _integer({"sliding_window": 4096, **raw}, "sliding_window")
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if index >= first else 0 for index in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"config.json: layer_types must list {num_layers} layers")
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"config.json: layer type {unknown[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _dtype(raw: Mapping[str, Any]) -> str:
    """Number format of the stored weights; files that do not say mean float32."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not supported (supported: {', '.join(DTYPES)})")
    return name


def _eos_token_ids(generation: Mapping[str, Any], raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """One id or a list, from the generation file, else the config. Ids that cannot occur are left out."""
    said = generation.get("eos_token_id")
    said = raw.get("eos_token_id") if said is None else said
    ids = said if isinstance(said, list) else [said]
    return tuple(dict.fromkeys(i for i in ids if type(i) is int and 0 <= i < vocab_size))


def _default_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """Sampling defaults under the request's names; ``max_new_tokens`` is called ``max_tokens`` there."""
    names = {name: name for name in SAMPLING_FIELDS} | {"max_new_tokens": "max_tokens"}
    found = {ours: generation.get(theirs) for theirs, ours in names.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and type(value) is not bool}
