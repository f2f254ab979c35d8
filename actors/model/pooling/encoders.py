"""BERT, and RoBERTa and XLM-R: all tokens see each other, and nothing is cached."""

from __future__ import annotations

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.family import Family, NameMap
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.spec import Dense, EncoderSpec, Gqa, HeadSpec, LayerSpec, ModelSpec, NormSpec

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def parse_bert(fields: Fields) -> ModelSpec:
    """Positions are counted from 0."""
    return _parse(fields, 0)


def parse_roberta(fields: Fields) -> ModelSpec:
    """Positions are counted from the one behind that of padding."""
    pad = fields.get("pad_token_id", 1)
    if type(pad) is not int or pad < 0:
        raise ModelError(f"config.json: pad_token_id is {pad!r}, not a whole number")
    return _parse(fields, pad + 1)


def _parse(fields: Fields, first: int) -> ModelSpec:
    fields.refuse("is_decoder", "an encoder as a decoder")
    fields.refuse("add_cross_attention", "an encoder beside it")
    fields.word("position_embedding_type", "absolute", {"absolute": True})
    heads, head_dim, rows = fields.integer("num_attention_heads"), fields.head_dim(), fields.integer(POSITIONS, 512)
    if rows <= first:
        raise ModelError(f"config.json: {POSITIONS} {rows} leaves no position behind that of padding")
    mixer = Gqa(heads, heads, head_dim, head_dim**-0.5, rope=None, bias=True, out_bias=True)
    act = fields.word("hidden_act", "gelu", ACTIVATIONS)
    layer = LayerSpec(mixer, Dense(fields.integer("intermediate_size"), act, gated=False, bias=True), "sum")
    return ModelSpec(
        vocab=fields.integer("vocab_size"),
        hidden=fields.integer("hidden_size"),
        layers=(layer,) * fields.integer("num_hidden_layers"),
        norm=NormSpec("layer", fields.number("layer_norm_eps", 1e-12)),
        head=HeadSpec(tied=True),
        encoder=EncoderSpec(rows, first, fields.integer("type_vocab_size", 2)),
    )


POSITIONS = "max_position_embeddings"
BUFFERS = tuple(
    f"{prefix}embeddings.{name}" for prefix in ("", "bert.", "roberta.") for name in ("position_ids", "token_type_ids")
)
UNREAD = (*BUFFERS, "cls.", "lm_head.")
OLD_NORMS = ((".gamma", ".weight"), (".beta", ".bias"))
NAMES = NameMap(("bert.", "roberta.", ""), (*UNREAD, "pooler.", "bert.pooler.", "roberta.pooler."), OLD_NORMS)
WITH_POOLER = NameMap(("bert.", ""), UNREAD, OLD_NORMS)
"""A classifier of BERT reads its pooler, too."""
ODD = {"hidden_size": 60, "num_attention_heads": 5}
BERT = Family(
    name="BERT",
    architectures=("BertModel",),
    model_type="bert",
    parse=parse_bert,
    names=NAMES,
    golden={"bert": {}, "bert-odd": ODD, "bert-short": {"max_position_embeddings": 40, "type_vocab_size": 1}},
)
BERT_CLASSIFIER = Family(
    name="BERT classifiers",
    architectures=("BertForSequenceClassification",),
    model_type="bert",
    parse=parse_bert,
    names=WITH_POOLER,
    golden={
        "bert-classifier": {"num_labels": 1}, "bert-classifier-odd": {**ODD, "num_labels": 3},
        "bert-classifier-tanh": {"hidden_act": "gelu_new", "num_labels": 2},
    },
)  # fmt: skip
ROBERTA = Family(
    name="RoBERTa, XLM-R",
    architectures=("RobertaModel", "XLMRobertaModel"),
    model_type="xlm-roberta",
    parse=parse_roberta,
    names=NAMES,
    golden={
        "xlm-r": {"pad_token_id": 1, "type_vocab_size": 1}, "xlm-r-odd": {**ODD, "pad_token_id": 1},
        "xlm-r-padded": {"pad_token_id": 4, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    },
)  # fmt: skip
ROBERTA_CLASSIFIER = Family(
    name="RoBERTa and XLM-R classifiers",
    architectures=("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"),
    model_type="xlm-roberta",
    parse=parse_roberta,
    names=NAMES,
    golden={
        "xlm-r-classifier": {"pad_token_id": 1, "type_vocab_size": 1, "num_labels": 1},
        "xlm-r-classifier-odd": {**ODD, "pad_token_id": 1, "num_labels": 1},
        "xlm-r-classifier-wide": {"pad_token_id": 1, "type_vocab_size": 1, "num_labels": 4},
    },
)  # fmt: skip
ENCODERS = (BERT, BERT_CLASSIFIER, ROBERTA, ROBERTA_CLASSIFIER)
