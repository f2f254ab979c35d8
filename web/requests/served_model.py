"""The served model as the ingress knows it: its names, limits and sampling defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagebus.actors.model.pooling.pooler import Pooler, Pooling
from pagebus.actors.settings import Settings
from pagebus.bus.messages import AdapterSource
from pagebus.web.http.errors import bad_field, model_not_found

DEFAULT_NAME = "pagebus"
"""The name of the shipped model, where none is given."""
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """``names[0]`` is the one that answers carry. ``vocab_size`` and ``max_model_len`` None: not known here.

    ``default_sampling`` holds the model's own defaults for fields a client leaves out.
    """

    names: tuple[str, ...]
    vocab_size: int | None = None
    max_model_len: int | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    created_s: int = 0
    priorities: bool = False
    """Whether requests may have a priority (``--scheduling-policy priority``)."""
    max_beam_width: int = 16
    """Most beams of one search (``--max-beam-width``)."""
    request_templates: bool = False
    """Whether requests may bring chat templates (``--trust-request-chat-template``)."""
    tool_parser: str = ""
    auto_tools: bool = False
    """Whether models may call tools as they like (``--enable-auto-tool-choice``)."""
    reasoning_parser: str = ""
    allow_unknown_fields: bool = False
    has_tokenizer: bool = True
    """Whether prompts may be texts, and answers are (not with ``--skip-tokenizer-init``)."""
    forces_usage: bool = False
    """Whether every stream ends with its usage (``--enable-force-include-usage``)."""
    hidden_size: int | None = None
    """Numbers in an embedding; None: not known here."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """Numbers of embeddings that the model was trained to be cut to; empty: it does not say."""
    pooling: Pooling = "last"
    """What embeddings are made of (``--pooling-type``)."""
    pooler: Pooler | None = None
    """What the model makes of prompts in place of generating; None: it generates, and embeds."""
    in_one_step: bool = False
    """Whether it computes prompts whole, and caches nothing."""
    has_score_template: bool = False
    """Whether a template was given (``--chat-template``), which renders pairs of query and document, too."""
    max_logprobs: int = 20
    """The most alternatives per token in logprobs; -1: the whole vocabulary (``--max-logprobs``)."""
    tokenizer_info: Mapping[str, Any] | None = None
    """The tokenizer's configuration, if clients may know it (``--enable-tokenizer-info-endpoint``)."""
    adapters: dict[str, AdapterSource] = field(default_factory=dict)
    """Adapters that clients may name in place of the model. Its owner changes it:
    :class:`pagebus.web.ingress.adapter_registry.AdapterRegistry`."""

    @property
    def name(self) -> str:
        return self.names[0]

    def knows(self, name: str) -> bool:
        """Whether clients may name it as their model."""
        return name in self.names or name in self.adapters

    def adapter_of(self, name: str, *, pooled: bool = False) -> AdapterSource | None:
        """What is computed with beside the model for a client that named it so. ``pooled``: nothing is generated.

        Raises:
            ApiError: 404, it has been unloaded; 400, adapters do not serve this.
        """
        if not self.knows(name):
            raise model_not_found(name)
        if pooled and name in self.adapters:
            raise bad_field("model", f"{name} is an adapter; these generate, and embed or classify nothing yet")
        return self.adapters.get(name)


def served_names(settings: Settings) -> tuple[str, ...]:
    """The names that clients may use: those given, else the model as given."""
    return settings.served_model_name or (settings.model or DEFAULT_NAME,)


async def load_served_model(settings: Settings, created_s: int) -> ServedModel:
    """Read the model's config, beside the loop (a hub may have to be asked).

    Raises:
        ModelError: there is no such model, or its config cannot be read.
    """
    return await asyncio.to_thread(_load, settings, created_s)


def cached_block_size(settings: Settings) -> int:
    """Tokens per block of the prefix cache; 0: it is disabled."""
    return settings.block_size if settings.enable_prefix_caching else 0


def _load(settings: Settings, created_s: int) -> ServedModel:
    from pagebus.actors.model.config import ModelConfig, effective_max_model_len

    config = ModelConfig.of(settings)
    pooler = config.pooler
    wanted = config.default_sampling if settings.generation_config == "auto" else {}
    return ServedModel(
        names=served_names(settings),
        vocab_size=config.vocab_size,
        max_model_len=effective_max_model_len(settings, config),
        default_sampling={name: wanted[name] for name in SAMPLING_DEFAULTS if wanted.get(name) is not None},
        created_s=created_s,
        priorities=settings.scheduling_policy == "priority",
        max_beam_width=settings.max_beam_width,
        request_templates=settings.trust_request_chat_template,
        tool_parser=settings.tool_call_parser or "",
        auto_tools=settings.enable_auto_tool_choice,
        reasoning_parser=settings.reasoning_parser or config.reasoning_parser,
        allow_unknown_fields=settings.allow_unknown_fields,
        has_tokenizer=settings.has_tokenizer,
        forces_usage=settings.enable_force_include_usage,
        hidden_size=config.hidden_size if pooler is None else pooler.width(config.hidden_size),
        matryoshka_dimensions=config.matryoshka_dimensions,
        pooling=settings.pooling_type or (pooler.pooling if pooler is not None else "last"),  # type: ignore[arg-type]
        pooler=pooler,
        in_one_step=config.in_one_step,
        has_score_template=settings.chat_template is not None,
        max_logprobs=settings.max_logprobs,
        tokenizer_info=_tokenizer_info(settings) if settings.enable_tokenizer_info_endpoint else None,
    )


def _tokenizer_info(settings: Settings) -> dict[str, Any]:
    from pagebus.actors.model.config import resolve_tokenizer
    from pagebus.actors.model.tokenizer import read_info

    return read_info(resolve_tokenizer(settings), settings.chat_template)
