"""Small real tokenizers of both families, and model folders with them but without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello world, the quick brown fox jumps over the lazy dog.",
    "Emojis 🎉🎉👩‍👩‍👧 and 你好世界, 日本語, café naïve, Straße.",
    "don't  keep   spaces\n\nnor\tlines",
] * 3
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('Unknown role') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def byte_level() -> Tokenizer:
    """GPT-2 style, as Llama 3 and Qwen; among its added tokens is one outside the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("< 你 >"), AddedToken("é")])
    return tokenizer


def sentencepiece(strip: bool = True, extra: Sequence[Any] = ()) -> Tokenizer:
    """Llama 2 style: pieces, byte fallback, a space in front. ``extra`` decoder steps make it an unusual one."""
    pieces = sorted({c for text in CORPUS for c in text if c.isascii() and c != " "} | set("▁世<|>_"))
    words = ["▁Hello", "▁wor", "ld", "▁the", "▁▁", "quick", "▁qu", "�"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("l", "d"), ("▁", "▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *extra]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("▁<x>")])
    return tokenizer


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Puts ``<s>`` in front of what is encoded with special tokens."""
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def model_folder(
    path: Path,
    tokenizer: Tokenizer | None,
    *,
    tokenizer_class: str = "PreTrainedTokenizerFast",
    chat_template: str | None = CHAT_TEMPLATE,
    tokenizer_config: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a model's small files; None leaves the tokenizer out."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
        said: dict[str, Any] = {
            "tokenizer_class": tokenizer_class,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "clean_up_tokenization_spaces": False,
        }
        if chat_template is not None:
            said["chat_template"] = chat_template
        (path / "tokenizer_config.json").write_text(json.dumps(said | (tokenizer_config or {})))
    return path
