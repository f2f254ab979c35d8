"""Tokenizers of GGUF files equal those that they were made of, on texts of many languages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.tokenization_utils_base import generate_merges

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.gguf.header import GgufFile
from pagebus.actors.model.gguf.tokenizer import build_tokenizer
from pagebus.actors.model.tokenizer import TokenizerError, load_tokenizer, read_info
from tests.helpers.quantized.gguf_files import write_keys
from tests.helpers.quantized.gguf_tokenizers import byte_pairs, pieces

TEXTS = [
    "Hello world!  I'm here, they'LL say 12345 things…\n\n\n  tabs\t\tand   spaces ",
    "Привет, мир! Ёлка, ёж и 1234 — «цитата»", "你好世界。今天天气很好。東京 大阪、日本語", "नमस्ते दुनिया",
    "emoji 😀👩‍👩‍👧 e\u0301 é ﬁ", "def f(x):\n    return x**2  # комментарий\r\n\r\n", "العربية مرحبا بالعالم",
    "한국어 안녕하세요", "ภาษาไทย สวัสดี", "Ünïcödé ÅÄÖ ß ẞ İ camelCase HTTPServer", "  leading", " one", "", "\n",
    "a<|im_end|>b <s>x</s> <think> y</think>", "zero\u200bwidth \x00\x01", "1,000,000.50 $€£ 5/6/7 http://a.b/c?d=e",
    f"{'x' * 50}{' ' * 40}y",
]  # fmt: skip
"""Written for the purpose."""
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLISHED = {
    "llama-bpe": ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + ENDINGS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + ENDINGS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How texts are cut, in the words of the models' own ``tokenizer.json``."""
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def noise() -> list[str]:
    """Texts without sense, of all kinds of characters."""
    rng = random.Random(5)
    ranges = ((32, 127), (0x20, 0x250), (0x400, 0x460), (0x4E00, 0x4F00), (9, 14), (0x1F600, 0x1F640), (32, 33))
    return ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(60))) for _ in range(200)]


def trained(pre: str) -> Tokenizer:
    """A byte-level tokenizer as the models of this kind have it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    parts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in PUBLISHED)]
    if pre in PUBLISHED:
        parts.insert(0, pre_tokenizers.Split(Regex(PUBLISHED[pre]), "isolated"))
    elif pre == "smollm":
        parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def file(keys: dict[str, Any], architecture: str = "llama") -> GgufFile:
    return GgufFile(Path("model.gguf"), {"general.architecture": architecture, **keys}, {})


def check(ours: Tokenizer, original: Tokenizer) -> None:
    for text in TEXTS + noise():
        expected = original.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False).ids == expected.ids, text
        for skip in (False, True):
            assert ours.decode(expected.ids, skip_special_tokens=skip) == original.decode(
                expected.ids, skip_special_tokens=skip
            )


@pytest.mark.parametrize("pre", [*PUBLISHED, "gpt-2", "smollm"])
def test_byte_pairs(pre: str) -> None:
    """Also tokens of control and the author's own, and how they are written back."""
    original = trained(pre)
    check(build_tokenizer(file(byte_pairs(original, pre))), original)


def sentence_pieces(prefix: bool) -> tuple[Tokenizer, dict[str, float]]:
    """As Llama 2 (``prefix``: a blank in front of texts) and Gemma have it; the scores of its pieces."""
    plain = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    plain.train_from_iterator([text.replace(" ", "▁") for text in TEXTS * 3], trainer)
    learnt = sorted(plain.get_vocab(), key=plain.get_vocab().__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt]
    scores = {token: -float(rank) for rank, token in enumerate(tokens)}
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, scores)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer, scores


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentence_pieces(architecture: str) -> None:
    """Merges are found by scores, and in Gemma's files by the order of tokens, whatever the scores are."""
    original, scores = sentence_pieces(prefix=architecture == "llama")
    said = scores if architecture == "llama" else {}
    keys = pieces(original, said, add_space_prefix=architecture == "llama")
    check(build_tokenizer(file(keys, architecture)), original)


def test_the_first_token() -> None:
    """Llama 3's and SentencePiece's prompts begin with it unless the file says otherwise, others if it does."""
    pairs = byte_pairs(trained("qwen2"), "qwen2", bos_token_id=0, eos_token_id=1)
    blanks, scores = sentence_pieces(prefix=True)
    for keys, default in (
        (pairs, False), ({**pairs, "tokenizer.ggml.pre": "llama-bpe"}, True),
        (pieces(blanks, scores, bos_token_id=1, eos_token_id=2), True),
    ):  # fmt: skip
        bos, eos = (keys[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))
        for said, first in ((None, default), (True, True), (False, False)):
            more = {} if said is None else {"tokenizer.ggml.add_bos_token": said}
            assert (build_tokenizer(file(keys | more)).encode("a b").ids[0] == bos) is first
        ended = build_tokenizer(file({**keys, "tokenizer.ggml.add_eos_token": True})).encode("a b").ids
        assert ended[-1] == eos


def test_phi3_drops_spaces_behind_control_tokens() -> None:
    """As its own tokenizer does, and others do not."""
    blanks, scores = sentence_pieces(prefix=True)
    keys = pieces(blanks, scores)
    plain, phi3 = (build_tokenizer(file(keys, name)) for name in ("llama", "phi3"))
    end = blanks.token_to_id("</s>")
    assert plain.encode("</s>   a").ids == [end, *plain.encode("   a").ids]
    assert phi3.encode("</s>   a").ids == [end, *phi3.encode("a").ids] != plain.encode("</s>   a").ids
    assert phi3.encode("<s>   a").ids == plain.encode("<s>   a").ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not read"),
        ({"pre": "default"}, "tokenizer.ggml.pre 'default' is not read"),
        ({"merges": ["a b c"]}, "'a b c', which is no pair"),
        ({"merges": ["qq zz"]}, "the tokenizer's lists do not fit together"),
        ({"merges": [1]}, "merges is no list of str"),
        ({"token_type": [1]}, "token_type is no list of .* kinds"),
        ({"tokens": [1]}, "tokens is no list of texts"),
        ({"bos_token_id": 10**6, "add_bos_token": True}, "bos_token_id is 1000000, no token"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    """By the key."""
    keys = byte_pairs(trained("qwen2"), "qwen2") | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(ModelError, match=message):
        build_tokenizer(file(keys))


def test_a_token_without_end() -> None:
    """Merges are looked for at each of its characters, so it would take forever."""
    blanks, scores = sentence_pieces(prefix=True)
    keys = pieces(blanks, scores)
    keys["tokenizer.ggml.tokens"][-1] = "x" * 1001
    with pytest.raises(ModelError, match=r"a token of 1001 characters \('xxx.*\), more than 1000"):
        build_tokenizer(file(keys))


def test_a_file_as_the_tokenizer(tmp_path: Path) -> None:
    """With its chat template and the tokens that have a part of their own."""
    original = trained("qwen2")
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    keys = byte_pairs(original, "qwen2", bos_token_id=0, eos_token_id=3, padding_token_id=1)
    path = write_keys(tmp_path / "model.gguf", "qwen2", {**keys, "tokenizer.chat_template": template})
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    assert tokenizer("Привет 12")["input_ids"] == original.encode("Привет 12").ids
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "<|im_end|>", "</s>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    info = read_info(path, None)
    assert (info["chat_template"], info["eos_token"]) == (template, "<|im_end|>")
    assert load_tokenizer(write_keys(tmp_path / "none.gguf", "qwen2", {})) is None
    (tmp_path / "broken.gguf").write_bytes(path.read_bytes()[:-300])
    with pytest.raises(TokenizerError, match=r"broken\.gguf is not a readable GGUF file: it ends in"):
        load_tokenizer(tmp_path / "broken.gguf")
