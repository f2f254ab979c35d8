"""The model's tokenizer, loaded as ``transformers.AutoTokenizer`` would load it but without its cost.

``AutoTokenizer`` imports torch and every model's configuration (measured: 2.5 s and 400 MB, against 0.8 s and 63 MB for
the tokenizer classes alone). For the architectures that Pagebus serves, two small JSON files determine the class that
it would choose. So :func:`load_tokenizer` uses that class directly, and ``AutoTokenizer`` only for the others. The
tokenizer and the detokenizer use this module; the ingress reports the configuration (:func:`read_info`).
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.gguf.files import is_gguf, read_file
from pagebus.actors.model.gguf.tokenizer import build_tokenizer, has_tokenizer, tokenizer_config

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""A folder with none of these has no tokenizer; its model still serves prompts given as token ids."""

TEMPLATE_FILE = "chat_template.jinja"
"""Where newer checkpoints have their chat template, instead of in the configuration."""
PROCESSOR_FILE = "chat_template.json"
"""Where checkpoints with images had it, for the class that reads images beside text (Mistral Small 3.1)."""
PATH_FIELDS = ("vocab_file", "merges_file", "tokenizer_file", "chat_template_file", "name_or_path")
GENERIC_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
OWN_CLASS = {
    "llama": "LlamaTokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "bert": "BertTokenizer",
    "roberta": "RobertaTokenizer", "xlm-roberta": "XLMRobertaTokenizer",
}  # fmt: skip
"""Tokenizer class that ``transformers`` registers for a model type. Mistral's is not fixed by it."""

GENERIC_TYPES = frozenset({"internlm2", "internlm3"})
"""Model types whose own class, which comes as code, ``transformers`` passes over."""


class TokenizerError(Exception):
    """The tokenizer files cannot be used; the text says which folder and why."""


def load_tokenizer(folder: Path) -> Any | None:
    """The ``transformers`` tokenizer of ``folder`` (a Rust-backed one), or None if the folder has no tokenizer files.
    ``folder`` may be a GGUF file.

    Raises:
        TokenizerError: the files are broken, need code from the model's author, or need a slow tokenizer.
    """
    if is_gguf(folder):
        return _of_gguf(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    config = _read_json(folder / "tokenizer_config.json")
    if "auto_map" in config and not _needs_no_code(folder):
        raise TokenizerError(f"{folder}: the tokenizer needs code that comes with the model, which is never run")
    name, more = _class_name(folder, config), _processor_template(folder, config)
    try:
        loader = getattr(importlib.import_module("transformers"), name)
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True, **more)
    except Exception as error:
        raise TokenizerError(f"{folder}: the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TokenizerError(f"{folder}: {type(tokenizer).__name__} has no tokenizer.json to load")
    backend.no_padding()
    backend.no_truncation()
    return tokenizer


def _of_gguf(path: Path) -> Any | None:
    """As `load_tokenizer`."""
    try:
        file = read_file(path)
        if not has_tokenizer(file):
            return None
        tokenizer, said = build_tokenizer(file), tokenizer_config(file)
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    kind = getattr(importlib.import_module("transformers"), said.pop("tokenizer_class"))
    return kind(tokenizer_object=tokenizer, **said)


def byte_alphabet() -> dict[str, int]:
    """Byte by character, as byte-level vocabularies write bytes in printable characters (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


def read_template(setting: str) -> str:
    """``--chat-template``: the content of a file, or the text if it looks like a template. Raises TokenizerError."""
    if "{" in setting or "\n" in setting:
        return setting
    try:
        return Path(setting).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"--chat-template {setting!r}: {error}") from error


def read_info(folder: Path, template: str | None) -> dict[str, Any]:
    """The configuration of the tokenizer in ``folder``, without paths of files. A token that has a description is
    reported as its text. ``template`` is ``--chat-template``, which overrides the folder's own.

    Raises:
        TokenizerError: a file is broken.
    """
    config = _config(folder)
    info = {name: _texts(value) for name, value in config.items() if name not in PATH_FIELDS}
    info |= _processor_template(folder, config)
    file = folder / TEMPLATE_FILE
    if template is not None or file.is_file():
        info["chat_template"] = read_template(template if template is not None else str(file))
    return info


def _processor_template(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The field ``chat_template`` of PROCESSOR_FILE, if the tokenizer has none of its own. Raises TokenizerError."""
    if config.get("chat_template") or (folder / TEMPLATE_FILE).is_file():
        return {}
    found = _read_json(folder / PROCESSOR_FILE).get("chat_template")
    if not isinstance(found, str | None):
        raise TokenizerError(f"{folder / PROCESSOR_FILE}: chat_template is no text")
    return {} if found is None else {"chat_template": found}


def _config(folder: Path) -> Mapping[str, Any]:
    if not is_gguf(folder):
        return _read_json(folder / "tokenizer_config.json")
    try:
        return tokenizer_config(read_file(folder))
    except ModelError as error:
        raise TokenizerError(str(error)) from error


def _texts(value: Any) -> Any:
    """With texts for tokens, however deep they lie."""
    if isinstance(value, list):
        return [_texts(each) for each in value]
    if not isinstance(value, dict):
        return value
    content = value.get("content")
    return content if isinstance(content, str) else {name: _texts(each) for name, each in value.items()}


def _needs_no_code(folder: Path) -> bool:
    """Whether a tokenizer that comes with code is one of ``tokenizer.json`` all the same."""
    generic = _read_json(folder / "config.json").get("model_type") in GENERIC_TYPES
    return generic and (folder / "tokenizer.json").is_file()


def _class_name(folder: Path, config: Mapping[str, Any]) -> str:
    """Name of the ``transformers`` class to load with, ``AutoTokenizer`` where it is not certain."""
    tokenizer_json = folder / "tokenizer.json"
    declared = str(config.get("tokenizer_class") or "")
    model_type = _read_json(folder / "config.json").get("model_type")
    if model_type in GENERIC_TYPES and tokenizer_json.is_file():
        return "PreTrainedTokenizerFast"
    known = model_type in OWN_CLASS or model_type == "mistral" or model_type is None
    if not known or not tokenizer_json.is_file():
        return "AutoTokenizer"
    if declared in GENERIC_CLASSES:
        return "PreTrainedTokenizerFast"
    declared = declared.removesuffix("Fast")
    if model_type == "mistral" and declared == "LlamaTokenizer" and find_spec("mistral_common") is None:
        return "PreTrainedTokenizerFast"
    own = OWN_CLASS.get(str(model_type))
    if own is None or declared != own:
        return "AutoTokenizer"
    if own == "LlamaTokenizer" and _is_byte_level(tokenizer_json):
        return "PreTrainedTokenizerFast"  # LlamaTokenizer would replace the file's byte-level rules by its own
    return own


def _is_byte_level(tokenizer_json: Path) -> bool:
    parts = _read_json(tokenizer_json)
    return any('"ByteLevel"' in json.dumps(parts.get(part)) for part in ("pre_tokenizer", "decoder"))


def _read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in ``path``, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return content
