"""What files say of models that pool, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.model.config import (
    ModelConfig,
    ModelError,
    effective_max_model_len,
    parse_config,
    planned_model_len,
)
from pagebus.actors.model.pooling.modules import read_modules
from pagebus.actors.settings import Settings
from tests.actors.model.pooling.tiny_models import write_modules

ENCODER: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 514,
}  # fmt: skip
DECODER = {**ENCODER, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}


def parse(architecture: str, **fields: Any) -> ModelConfig:
    base = DECODER if "Qwen" in architecture else ENCODER
    return parse_config({"architectures": [architecture], **base, **fields}, {})


def test_positions_of_xlm_r_begin_behind_padding() -> None:
    """514 rows are 512 tokens; prompts may have all of them, and one place is planned for the end."""
    config = parse("XLMRobertaModel", pad_token_id=1, type_vocab_size=1)
    assert config.spec.encoder is not None
    assert (config.spec.encoder.first, config.max_position_embeddings) == (2, 512)
    assert (effective_max_model_len(Settings(), config), planned_model_len(Settings(), config)) == (512, 513)
    assert effective_max_model_len(Settings(max_num_batched_tokens=100), config) == 100
    longer = parse("XLMRobertaModel", pad_token_id=1, type_vocab_size=1, model_max_length=8192)
    with pytest.raises(ModelError, match="only 512 positions"):  # it has a table of them
        effective_max_model_len(Settings(max_model_len=513), longer)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"num_labels": 1}, (("LABEL_0",), "sigmoid")),
        ({}, (("LABEL_0", "LABEL_1"), "softmax")),
        ({"id2label": {"1": "no", "0": "yes"}}, (("yes", "no"), "softmax")),
        ({"num_labels": 1, "problem_type": "regression"}, (("LABEL_0",), "none")),
        ({"problem_type": "multi_label_classification"}, (("LABEL_0", "LABEL_1"), "sigmoid")),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
         (("LABEL_0",), "none")),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
         (("LABEL_0",), "sigmoid")),
    ],
)  # fmt: skip
def test_labels_and_activations(fields: dict[str, Any], found: tuple[tuple[str, ...], str]) -> None:
    """As transformers and sentence-transformers have them."""
    pooler = parse("BertForSequenceClassification", **fields).pooler
    assert pooler is not None
    assert (pooler.labels, pooler.activation) == found


def test_what_pools() -> None:
    """By the architecture: encoders by the first token, decoders without a head by the last one."""
    poolings = {name: parse(name).pooler for name in ("BertModel", "Qwen3Model", "Qwen3ForSequenceClassification")}
    assert [(each.pooling, each.joined, each.classifies) for each in poolings.values() if each] == [
        ("cls", False, False), ("last", True, False), ("last", True, True),
    ]  # fmt: skip
    assert parse("Qwen3ForCausalLM").pooler is None


@pytest.mark.parametrize(
    ("architecture", "fields", "says"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("BertModel", {"is_decoder": True}, "is_decoder"),
        ("BertModel", {"hidden_act": "relu"}, "hidden_act"),
        ("Qwen2Model", {"is_causal": False}, "is_causal"),
        ("BertForSequenceClassification", {"sbert_ce_default_activation_function": "a.Swish"}, "Swish"),
    ],
)
def test_what_would_change_the_result_is_refused(architecture: str, fields: dict[str, Any], says: str) -> None:
    """By name, never approximated."""
    with pytest.raises(ModelError, match=says):
        parse(architecture, **fields)


def test_modules(tmp_path: Path) -> None:
    """Pooling, products and norm, in the folders that the list names."""
    write_modules(tmp_path, "mean", normalize=False, dense=8, most_tokens=77)
    found = read_modules(tmp_path)
    assert found is not None
    assert (found.pooling, found.normalize, found.most_tokens) == ("mean", False, 77)
    assert [(each.name, each.width, each.act, each.file) for each in found.products] == [
        ("2_Dense.linear", 8, "tanh", "2_Dense")
    ]
    pooler = parse_config({"architectures": ["BertModel"], **ENCODER}, {}, found).pooler
    assert pooler is not None
    config = parse_config({"architectures": ["BertModel"], **ENCODER}, {}, found)
    assert effective_max_model_len(Settings(), config) == 77
    assert effective_max_model_len(Settings(max_model_len=200), config) == 200
    assert pooler.width(64) == 8


def test_a_reranker_that_compares_tokens_generates(tmp_path: Path) -> None:
    """Qwen3-Reranker, zerank-2: until the tokens are named."""
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {
            "idx": 1,
            "path": "1_LogitScore",
            "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        },
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert read_modules(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens"),
        ({"1_Pooling/config.json": {"pooling_mode": ["cls", "mean"]}}, r"pooling_mode \['cls', 'mean'\] is not"),
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}}, "and"),
        ({"modules.json": [{"type": "a.Pooling", "path": "../x"}]}, "outside"),
        ({"modules.json": [{"type": "a.WeightedLayerPooling", "path": "1_Pooling"}]}, "WeightedLayerPooling"),
        ({"modules.json": {"type": "a"}}, "no list"),
    ],
)
def test_modules_that_are_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    """The text names what is not known."""
    write_modules(tmp_path, "cls")
    for name, content in changes.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=says):
        read_modules(tmp_path)


def test_tokens_that_decide(tmp_path: Path) -> None:
    """Looked up in tokenizer.json; from a setting, or from what a converted model's config.json says."""
    raw = {"architectures": ["Qwen3ForCausalLM"], **DECODER}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    vocabulary = {"model": {"vocab": {"no": 5, "yes": 7}}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    pooler = ModelConfig.load(tmp_path, ("no", "yes")).pooler
    assert pooler is not None
    assert (pooler.between, pooler.labels, pooler.activation) == ((5, 7), ("LABEL_0",), "sigmoid")
    assert ModelConfig.load(tmp_path).pooler is None
    with pytest.raises(ModelError, match="'maybe' is no token"):
        ModelConfig.load(tmp_path, ("no", "maybe"))
    with pytest.raises(ModelError, match="two tokens"):
        ModelConfig.load(tmp_path, ("no",))
    (tmp_path / "config.json").write_text(json.dumps({**raw, "classifier_from_token": ["no", "yes"]}))
    assert ModelConfig.load(tmp_path).pooler == pooler
