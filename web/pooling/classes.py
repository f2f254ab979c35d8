"""The bodies of ``/classify`` and ``/pooling``: those of ``/v1/embeddings``, for other answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagebus.web.calls.answer_details import AnswerDetails
from pagebus.web.calls.pooled_forms import ClassForm
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields
from pagebus.web.requests.embeddings import (
    NO_MEDIA,
    UNSUPPORTED,
    USER,
    read_form,
    read_prompts_to_pool,
    with_common_fields,
)
from pagebus.web.requests.openai import read_model
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.served_model import ServedModel

TASKS = ("embed", "classify")


def parse_classify(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """The body of ``POST /classify``."""
    fields = Fields(data)
    parsed = read_prompts_to_pool(fields, read_model(fields, model), model)
    active = fields.boolean("use_activation", True)
    details = AnswerDetails(prompt_only=True, classes=_classes(model, active=active))
    parsed = with_common_fields(parsed, fields, model, details)
    fields.finish(NO_MEDIA | {"padding": ("do_not_pad",)}, USER, allow_unknown=model.allow_unknown_fields)
    return parsed


def parse_pooling(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """The body of ``POST /pooling``: ``task`` is what the model does, and may be left out."""
    fields = Fields(data)
    parsed = read_prompts_to_pool(fields, read_model(fields, model), model)
    default = "classify" if model.pooler is not None and model.pooler.classifies else "embed"
    task = fields.string("task", default, choices=TASKS)
    if task not in TASKS:
        raise bad_field(
            "task", f"must be one of {', '.join(TASKS)}: prompts are pooled to one vector, got {task[:40]!r}"
        )
    if task == "classify":
        details = _class_details(fields, model)
    else:
        details = AnswerDetails(prompt_only=True, embedding=read_form(fields, model))
    parsed = with_common_fields(parsed, fields, model, details)
    fields.finish(UNSUPPORTED | {"data": ()}, USER, allow_unknown=model.allow_unknown_fields)
    return parsed


def _class_details(fields: Fields, model: ServedModel) -> AnswerDetails:
    """Numbers of labels, in a form of embeddings that changes none."""
    active = fields.peek("use_activation") is not False
    form = replace(read_form(fields, model), normalize=False)
    if form.dimensions is not None:
        raise bad_field("dimensions", "is for embeddings")
    return AnswerDetails(prompt_only=True, embedding=form, classes=_classes(model, active=active))


def _classes(model: ServedModel, *, active: bool) -> ClassForm:
    """The labels, and if ``active`` what makes probabilities."""
    pooler = model.pooler
    return ClassForm(() if pooler is None else pooler.labels, pooler.activation if pooler and active else "none")
