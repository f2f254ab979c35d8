"""The parsed body of one HTTP call, and the messages that it becomes on the bus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pagebus.bus.messages import AdapterSource, GenerateRequest, Int32Array, SamplingParams
from pagebus.web.calls.answer_details import AnswerDetails
from pagebus.web.http.naming import FieldNames


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a call: exactly one of the three is given."""

    text: str | None = None
    token_ids: Int32Array | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    second_text: str | None = None
    """What ``text`` is paired with."""
    path: str = ""
    """Where it is in the body."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """``usage``: a last chunk with the usage. ``continuous``: usage in every chunk. ``interval``: tokens of a choice
    that go into one chunk, but for its first and last."""

    usage: bool = False
    continuous: bool = False
    interval: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One parsed HTTP call: prompts, each to be continued ``sampling.n`` times."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    stream: bool
    stream_options: StreamOptions
    add_special_tokens: bool
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    documents: tuple[dict[str, str], ...] = ()
    chat_template: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    priority: int = 0
    cache_salt: str | None = None
    client: str = ""
    weight: float = 1.0
    """Name and weight of the API key it came with."""
    timeout_s: float | None = None
    """The deadline of the call, in seconds after its arrival."""
    request_id: str | None = None
    """The request id from the body; the client's header takes precedence."""
    details: AnswerDetails | None = None
    """Details of the answer besides text; None: none."""
    token_offsets: bool = False
    """Whether a rendered prompt includes the text offsets of its tokens."""
    prediction: str | None = None
    """A text that the answer is expected to resemble."""
    names: FieldNames = ()
    """What fields are called in the client's body, where errors have other names."""

    @property
    def names_by_prompt(self) -> list[FieldNames]:
        """The same for errors that are found in a prompt, which is named by its place."""
        return [(*self.names, (r"(prompt|input|messages)$", prompt.path)) for prompt in self.prompts]

    def messages_for_bus(
        self, request_ids: Sequence[str], ingress: str, arrived_s: float, adapter: AdapterSource | None = None
    ) -> list[GenerateRequest]:
        """One message per prompt, in order. ``adapter``: what ``model`` names, unless it is the model."""
        return [
            GenerateRequest(
                request_id=request_id,
                ingress=ingress,
                sampling=self.sampling,
                prompt=prompt.text,
                second_text=prompt.second_text,
                messages=prompt.messages,
                add_special_tokens=self.add_special_tokens,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                chat_template_kwargs=self.chat_template_kwargs,
                tools=self.tools,
                documents=self.documents,
                chat_template=self.chat_template,
                truncate_prompt_tokens=self.truncate_prompt_tokens,
                truncation_side=self.truncation_side,
                priority=self.priority,
                cache_salt=self.cache_salt,
                client=self.client,
                weight=self.weight,
                arrived_s=arrived_s,
                prediction=self.prediction,
                adapter=adapter,
                prompt_token_ids=np.empty(0, np.int32) if prompt.token_ids is None else prompt.token_ids,
            )
            for request_id, prompt in zip(request_ids, self.prompts, strict=True)
        ]
