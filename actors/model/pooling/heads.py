"""From a ``config.json`` to the pooler of its model, and the names of the head's tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.family import Family, NameMap
from pagebus.actors.model.fields import Fields
from pagebus.actors.model.pooling.modules import Modules
from pagebus.actors.model.pooling.pooler import Activation, Pooler, Product
from pagebus.actors.model.spec import HeadSpec, ModelSpec

CLASSIFIER = "ForSequenceClassification"
BASE = "Model"
CAUSAL = "ForCausalLM"
TWO_WAYS = "from_2_way_softmax"
SCORE, BERT = ("classifier.dense", "classifier.out_proj"), ("pooler.dense", "classifier")


def causal_name(architecture: str) -> str:
    """The architecture that generates from the same layers: ``Qwen3ForSequenceClassification``, ``Qwen3Model`` ->
    ``Qwen3ForCausalLM``."""
    for suffix in (CLASSIFIER, BASE):
        if architecture.endswith(suffix):
            return architecture.removesuffix(suffix) + CAUSAL
    return architecture


def pooler_of(
    architecture: str, fields: Fields, hidden: int, *, encoder: bool, modules: Modules | None,
    between: tuple[int, int] | None,
) -> Pooler | None:  # fmt: skip
    """None of a model that generates. ``between``: the two tokens of which a generating model tells the likelier.

    Raises:
        ModelError: the head is one that Pagebus does not compute.
    """
    if between is not None:
        if not architecture.endswith((CAUSAL, CLASSIFIER)) or encoder:
            raise ModelError(f"--classifier-from-token: {architecture} has no head that tells tokens")
        return Pooler(labels=("LABEL_0",), between=between, activation=activation_of(fields, 1))
    if architecture.endswith(CLASSIFIER):
        labels = _labels(fields)
        head = _encoder_head(architecture, hidden, len(labels)) if encoder else (_plain("score", len(labels)),)
        act = activation_of(fields, len(labels))
        return Pooler("cls" if encoder else "last", head=head, labels=labels, activation=act, joined=not encoder)
    if modules is not None:
        return Pooler(
            modules.pooling, modules.normalize, modules.products, joined=not encoder, most_tokens=modules.most_tokens
        )
    if encoder:
        return Pooler("cls", joined=False)
    return Pooler("last") if architecture.endswith(BASE) else None


def pooled_spec(
    family: Family, fields: Fields, architecture: str, modules: Modules | None, between: tuple[int, int] | None
) -> tuple[ModelSpec, NameMap, Pooler | None]:
    """A model's spec, the names in its files, and its pooler. Raises ModelError."""
    spec = family.parse(fields)
    encoder = spec.encoder is not None
    pooler = pooler_of(architecture, fields, spec.hidden, encoder=encoder, modules=modules, between=between)
    if pooler is not None and not encoder and fields.get("is_causal") is False:
        raise ModelError("config.json: is_causal false is not supported (a decoder whose tokens all see each other)")
    if pooler is None or encoder or pooler.between is not None:
        return spec, family.names, pooler
    return replace(spec, head=HeadSpec(tied=True)), pooled_names(family.names), pooler


def _plain(name: str, width: int) -> Product:
    return Product(f"model.{name}", width, bias=False)


def _encoder_head(architecture: str, hidden: int, labels: int) -> tuple[Product, ...]:
    """Two products of the first token's state, a tanh behind the first."""
    first, second = BERT if architecture.startswith("Bert") else SCORE
    return Product(f"model.{first}", hidden, act="tanh"), Product(f"model.{second}", labels)


def _labels(fields: Fields) -> tuple[str, ...]:
    """By number: from ``id2label``, else as many as ``num_labels`` says (2, as in transformers)."""
    named = fields.get("id2label")
    if isinstance(named, dict) and named:
        try:
            return tuple(str(named[key]) for key in sorted(named, key=int))
        except ValueError as error:
            raise ModelError(f"config.json: id2label has a key that is no number: {error}") from error
    return tuple(f"LABEL_{index}" for index in range(fields.integer("num_labels", 2)))


def activation_of(fields: Fields, num_labels: int) -> Activation:
    """As sentence-transformers says it, else by the kind of problem, else a sigmoid of one label, a softmax of more."""
    inner = fields.get("sentence_transformers")
    named = inner.get("activation_fn") if isinstance(inner, dict) else None
    named = named or fields.get("sbert_ce_default_activation_function")
    if named is not None:
        known: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
        name = str(named).rsplit(".", 1)[-1]
        if name not in known:
            raise ModelError(f"config.json: activation {named!r} of scores is not supported (only {', '.join(known)})")
        return known[name]
    kinds: dict[object, Activation] = {
        "regression": "none", "multi_label_classification": "sigmoid", "single_label_classification": "softmax",
    }  # fmt: skip
    default: Activation = "sigmoid" if num_labels < 2 else "softmax"
    kind = kinds.get(fields.get("problem_type"), default)
    return "sigmoid" if kind == "softmax" and num_labels < 2 else kind


def pooled_names(names: NameMap) -> NameMap:
    """The names in the files of a decoder that pools: perhaps without ``model.`` in front, as a bare model is saved,
    and without a head of tokens."""
    return replace(names, prefixes=(*names.prefixes, "model.", ""), skip=(*names.skip, "lm_head.", "model.lm_head."))


def tokens_between(folder: Path, raw: dict[str, Any], given: tuple[str, ...]) -> tuple[int, int] | None:
    """Ids of the two tokens between which a reranker decides: as a setting or ``config.json`` gives them.

    Raises:
        ModelError: they are not two tokens of the model's tokenizer, or are to be weighed in an unknown way.
    """
    tokens = given or tuple(raw.get("classifier_from_token") or ())
    if not tokens:
        return None
    if (method := raw.get("method", TWO_WAYS)) != TWO_WAYS:
        raise ModelError(f"config.json: method {method!r} is not supported (only {TWO_WAYS})")
    if len(tokens) != 2 or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"--classifier-from-token: must be two tokens, got {', '.join(map(str, tokens))}")
    known = _vocabulary(folder)
    missing = [token for token in tokens if token not in known]
    if missing:
        raise ModelError(f"--classifier-from-token: {missing[0]!r} is no token of the model's tokenizer.json")
    return known[tokens[0]], known[tokens[1]]


def _vocabulary(folder: Path) -> dict[str, int]:
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        added = {each["content"]: each["id"] for each in content.get("added_tokens") or ()}
        vocabulary = content["model"]["vocab"]
        return {**vocabulary, **added} if isinstance(vocabulary, dict) else added
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"--classifier-from-token: {folder / 'tokenizer.json'} cannot be read: {error}") from error
