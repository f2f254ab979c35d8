"""Loading tokenizers: the class AutoTokenizer would choose, without importing what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.model.tokenizer import TokenizerError, load_tokenizer, read_info
from tests.helpers.tokenizer_factory import byte_level, model_folder, sentencepiece, with_bos
from tests.helpers.waiting import LIMIT_S

TEXTS = ["Hello world", " é 你好 🎉", "a<|im_end|>b</s>", "don't  keep\n\n  spaces 12345", ""]
KNOWN = [
    ("llama", "PreTrainedTokenizerFast", "byte level"),
    ("llama", "TokenizersBackend", "llama"),
    ("llama", "LlamaTokenizer", "llama"),
    ("llama", "LlamaTokenizerFast", "byte level"),
    ("mistral", "LlamaTokenizer", "llama"),
    ("mistral", "LlamaTokenizerFast", "llama"),
    ("mistral", "PreTrainedTokenizerFast", "byte level"),
    ("qwen2", "Qwen2Tokenizer", "byte level"),
    ("qwen3", "Qwen2TokenizerFast", "byte level"),
]


@pytest.mark.parametrize(("model_type", "declared", "family"), KNOWN)
def test_same_tokenizer_as_auto_tokenizer(tmp_path: Path, model_type: str, declared: str, family: str) -> None:
    """Class, ids, text and chat template are AutoTokenizer's."""
    from transformers import AutoTokenizer

    made: Any = with_bos(byte_level() if family == "byte level" else sentencepiece())
    folder = model_folder(tmp_path, made, tokenizer_class=declared, model_type=model_type)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert ours is not None

    assert type(theirs) is type(ours)
    for special in (False, True):
        assert (
            theirs(TEXTS, add_special_tokens=special)["input_ids"]
            == ours(TEXTS, add_special_tokens=special)["input_ids"]
        )
    ids = list(range(len(theirs)))
    assert theirs.decode(ids) == ours.backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert theirs.chat_template == ours.chat_template


def _template(folder: Path) -> Any:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer.chat_template


def test_a_processor_s_chat_template(tmp_path: Path) -> None:
    """Mistral-Small-3.1 has its template in no other file; one of the tokenizer's own counts before it."""
    folder = model_folder(tmp_path, byte_level(), chat_template=None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'theirs' }}"}))
    assert (_template(folder), read_info(folder, None)["chat_template"]) == ("{{ 'theirs' }}",) * 2
    (folder / "chat_template.jinja").write_text("{{ 'own' }}")
    assert (_template(folder), read_info(folder, None)["chat_template"]) == ("{{ 'own' }}",) * 2
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": [1]}))
    with pytest.raises(TokenizerError, match=r"chat_template\.json: chat_template is no text"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("model_type", "declared"), [("llama", "PreTrainedTokenizerFast"), ("qwen3", "Qwen2Tokenizer")]
)
def test_known_tokenizers_load_without_torch(tmp_path: Path, model_type: str, declared: str) -> None:
    """The actors that only handle text stay small and start quickly."""
    folder = model_folder(tmp_path, byte_level(), tokenizer_class=declared, model_type=model_type)
    script = (
        "import sys, pathlib; from pagebus.actors.model.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(pathlib.Path({str(folder)!r}))\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=False)\n"
        "import pagebus.actors.tokenizer.actor, pagebus.actors.detokenizer.actor\n"
        "sys.exit('torch' in sys.modules)\n"
    )

    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=LIMIT_S).returncode == 0


def test_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    """Such a model serves token ids only."""
    assert load_tokenizer(model_folder(tmp_path, None)) is None


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "{", "not valid JSON|cannot be loaded"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}', "never run"),
    ],
)
def test_broken_files_are_one_clear_error(tmp_path: Path, name: str, content: str, reason: str) -> None:
    """The folder and the reason are named."""
    folder = model_folder(tmp_path, byte_level())
    (folder / name).write_text(content)

    with pytest.raises(TokenizerError, match=reason) as raised:
        load_tokenizer(folder)
    assert str(folder) in str(raised.value)
