"""Tiny random models that pool, in folders as the hub has them: with tokenizers, and files of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.helpers.model_factory import DEFAULTS, FAMILY_DEFAULTS, redraw
from tests.helpers.tokenizer_factory import CORPUS, byte_level

ENCODER: Mapping[str, Any] = {
    "vocab_size": 307, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 66,
}  # fmt: skip
SPECIAL = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "xlm-roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
}
POOLING = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}


def make_encoder(folder: Path, kind: str, *, classifies: bool = False, seed: int = 1, **fields: Any) -> Path:
    """A ``bert`` or ``xlm-roberta``, as a base model or a classifier, with its tokenizer."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**ENCODER, **fields})
    config.dtype = torch.float32
    auto = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    model = auto.from_config(config)
    redraw(model, seed)
    model.save_pretrained(str(folder))
    write_encoder_tokenizer(folder, kind)
    return folder


def make_decoder(folder: Path, *, kind: str = "ForCausalLM", seed: int = 1, **fields: Any) -> Path:
    """A Qwen 3 whose tokenizer ends each text, as those of Qwen3-Embedding do."""
    import transformers

    given = {**DEFAULTS, **FAMILY_DEFAULTS["qwen3"], "vocab_size": 400, "pad_token_id": 1, **fields}
    config = transformers.Qwen3Config(**given)
    config.dtype = torch.float32
    model = getattr(transformers, f"Qwen3{kind}")(config)
    redraw(model, seed)
    model.save_pretrained(str(folder))
    tokenizer = byte_level()
    end = tokenizer.token_to_id("</s>")
    ends = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), ends])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def write_modules(folder: Path, pooling: str, *, normalize: bool = True, most_tokens: int | None = None,
                  dense: int = 0, hidden: int = 64) -> None:  # fmt: skip
    """The files of sentence-transformers; ``dense``: the width of a product behind pooling, 0 for none."""
    from safetensors.torch import save_file

    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    modes = {name: name == POOLING[pooling] for name in (*POOLING.values(), "pooling_mode_max_tokens")}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": hidden, **modes}))
    if dense:
        modules.append(("2_Dense", "Dense"))
        (folder / "2_Dense").mkdir()
        act = "torch.nn.modules.activation.Tanh"
        config = {"in_features": hidden, "out_features": dense, "bias": True, "activation_function": act}
        (folder / "2_Dense/config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(5)
        tensors = {"linear.weight": torch.randn(dense, hidden, generator=generator) * 0.2,
                   "linear.bias": torch.randn(dense, generator=generator)}  # fmt: skip
        save_file(tensors, str(folder / "2_Dense/model.safetensors"))
    if normalize:
        modules.append(("3_Normalize", "Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if most_tokens is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most_tokens}))


def write_encoder_tokenizer(folder: Path, kind: str) -> None:
    """WordPiece as BERT's, with segments of pairs; or Unigram as XLM-R's, with none."""
    pieces = sorted({c for text in CORPUS for c in text.lower() if c.isascii() and not c.isspace()})
    special = SPECIAL[kind]
    if kind == "bert":
        vocab = [*special, *pieces, *(f"##{c}" for c in pieces), "the", "fox", "quick"]
        tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocab)}, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        single, pair, begin, end = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", "[CLS]", "[SEP]"
        names = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    else:
        vocab = [*special[:4], "▁", *pieces, *(f"▁{c}" for c in pieces), "▁the", "▁fox", special[4]]
        tokenizer = Tokenizer(models.Unigram([(token, -float(i)) for i, token in enumerate(vocab)], unk_id=3))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        single, pair, begin, end = "<s> $A </s>", "<s> $A </s> </s> $B </s>", "<s>", "</s>"
        names = {"tokenizer_class": "XLMRobertaTokenizer"}
    tokenizer.add_special_tokens(list(special))
    ids = [(token, tokenizer.token_to_id(token)) for token in (begin, end)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "model_max_length": 64}))
