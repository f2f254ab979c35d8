"""Reads the fields about reasoning: whether the model reasons, whether that is shown, and its token budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from pagebus.actors.model.reasoning import FORMATS, SWITCHES
from pagebus.bus.messages import SamplingParams, StructuredOutput
from pagebus.web.calls.parsing.formats import HARMONY
from pagebus.web.calls.parsing.output import Parsing
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields
from pagebus.web.http.limits import INT32_MAX
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.requests.structured import constrain

HARMONY_REASONING = "openai_gptoss"


def read_reasoning(
    fields: Fields,
    sampling: SamplingParams,
    parsing: Parsing | None,
    model: ServedModel,
    template_kwargs: Mapping[str, object],
) -> tuple[SamplingParams, Parsing | None]:
    """Take ``include_reasoning`` and ``thinking_token_budget``. A model that reasons does so in front of a structured
    output too."""
    shown, budget = fields.boolean("include_reasoning", True), _read_budget(fields, model)
    name = model.reasoning_parser
    reasons = bool(name) and FORMATS[name].is_on(template_kwargs)
    if reasons:
        sampling = _with_reasoning(sampling, name, budget)
        parsing = replace(parsing or Parsing(), reasoning=name, show_reasoning=shown)
    if name == HARMONY_REASONING or model.tool_parser == HARMONY:
        parsing = replace(parsing or Parsing(), harmony=True)
    if reasons or (parsing is not None and parsing.harmony):
        sampling = structs.replace(sampling, skip_special_tokens=False)  # the marks may be such
    return sampling, parsing


def read_thoughts_of_prompt(fields: Fields, sampling: SamplingParams, model: ServedModel) -> SamplingParams:
    """Take ``thinking_token_budget`` of a completion, whose prompt says whether the model reasons. A structured output
    comes behind reasoning that the prompt has begun."""
    budget, name = _read_budget(fields, model), model.reasoning_parser
    if not name:
        return sampling
    bounded = _with_reasoning(sampling, name, budget)
    output = bounded.structured_output
    if output is None:
        return bounded
    return structs.replace(bounded, structured_output=structs.replace(output, prompt_thought=-1))


def switch_reasoning(template_kwargs: Any, *, on: bool) -> Any:
    """The same with reasoning switched on or off, unless they say themselves whether it is on."""
    if not isinstance(template_kwargs, dict) or any(template_kwargs.get(name) is not None for name in SWITCHES):
        return template_kwargs
    return {**dict.fromkeys(SWITCHES, on), **template_kwargs}


def _read_budget(fields: Fields, model: ServedModel) -> int | None:
    """The token budget of reasoning; None: unlimited."""
    budget = fields.integer("thinking_token_budget", None, -1, INT32_MAX)
    if budget is None or budget == -1:
        return None
    if not model.reasoning_parser:
        raise bad_field("thinking_token_budget", "needs a server that was started with --reasoning-parser")
    return budget


def _with_reasoning(sampling: SamplingParams, name: str, budget: int | None) -> SamplingParams:
    """With the grammar behind the reasoning, if there is one, or one that bounds it."""
    output = sampling.structured_output
    if output is not None:
        output = structs.replace(output, reasoning=name, thinking_tokens=budget)
        return structs.replace(sampling, structured_output=output)
    if budget is None:
        return sampling
    field = "thinking_token_budget"
    return constrain(
        sampling, StructuredOutput(kind="anything", text="", field=field, reasoning=name, thinking_tokens=budget)
    )
