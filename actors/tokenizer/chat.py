"""Chat messages to prompt text, through the model's own template.

The template comes from the model's folder or ``--chat-template``, and from a client only with
``--trust-request-chat-template``. It runs in the immutable Jinja sandbox of ``transformers``, in a process with limits
(:mod:`pagebus.actors.tokenizer.render_process`). A special token that a client *writes* into a message (``<|im_end|>``,
say) stays plain text: only those that the template itself writes become special tokens, so no message can forge the end
of its turn or another role. For that, the client's special tokens are marked before the template runs, and
:class:`Rendered` says which parts of the result are marked. (Plain ``apply_chat_template`` makes no such difference.
Prompts of the completions route are not touched: there a special token in the text is one, as ``transformers``
encodes it.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from pagebus.actors.model.tokenizer import TokenizerError, read_template
from pagebus.actors.tokenizer.refusal import Refusal
from pagebus.actors.tokenizer.render_process import RenderFailure, RenderLimit, RenderProcess
from pagebus.bus.messages import GenerateRequest, JsonValue

MARK_OPEN, MARK_CLOSE = "\ufdd0", "\ufdd1"
"""Unicode noncharacters, which no text contains, around a special token that a client wrote."""
RESERVED_KWARGS = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding", "truncation"),
        *("add_generation_prompt", "continue_final_message", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "self", "raise_exception"),
    )
)
MAX_ERROR_CHARS = 500
DEVELOPER = "developer"
"""The role that has replaced ``system`` in OpenAI's API; few templates know it."""
GIVEN_TEMPLATE_CPU_S = 0.25
"""Computing time of a client's own template, which has to be compiled each time: the chats behind it wait."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat in pieces; odd ones (index 1, 3, ...) are special tokens to be encoded as plain text."""

    pieces: tuple[str, ...]


class _Generation(Extension):
    """The one tag of ``transformers`` that Jinja does not have."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the tag as its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The chat template of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, override: str | None = None) -> None:
        """``override`` is ``--chat-template``: the path of a file, or the template itself.

        Raises:
            TokenizerError: ``override`` is neither, or cannot be parsed.
        """
        self._tokenizer = tokenizer
        self._template = None if override is None else own_template(override)
        special = {t.content for t in tokenizer.backend_tokenizer.get_added_tokens_decoder().values() if t.special}
        longest_first = sorted(special, key=lambda token: (-len(token), token))
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._special = re.compile(pattern)
        self._marked = re.compile(f"{MARK_OPEN}({pattern}){MARK_CLOSE}|[{MARK_OPEN}{MARK_CLOSE}]")
        self._process = RenderProcess(self._render, refusals=TemplateError)
        self._process_of_given = RenderProcess(self._render, refusals=TemplateError, cpu_s=GIVEN_TEMPLATE_CPU_S)

    def close(self) -> None:
        """End the processes that render."""
        self._process.close()
        self._process_of_given.close()

    def render(self, request: GenerateRequest) -> Rendered:
        """The prompt of a chat request.

        Raises:
            Refusal: 400: no template, messages it refuses or cannot use, or arguments a client may not give.
        """
        messages: Any = [_plain_message(i, message) for i, message in enumerate(request.messages or ())]
        if not messages:
            raise Refusal("messages: give at least one message", param="messages")
        if any(message["role"] == DEVELOPER for message in messages) and not self._knows_developers(request):
            messages = _told_by_system(messages)
        kwargs: Any = _checked_kwargs(request.chat_template_kwargs)
        if request.continue_final_message and request.add_generation_prompt:
            raise Refusal(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        if request.tools:
            kwargs["tools"] = list(request.tools)
        if request.documents:
            kwargs["documents"] = list(request.documents)
        marked = self._special.search(_all_text((messages, kwargs))) is not None
        if marked:
            messages, kwargs = self._mark(messages), self._mark(kwargs)
        text = self._apply(request, messages, kwargs)
        return Rendered(self._split(text) if marked else (text,))

    def _knows_developers(self, request: GenerateRequest) -> bool:
        """Whether the template names the role; vLLM decides in the same way."""
        template = request.chat_template or self._template or self._tokenizer.chat_template or ""
        return any(f"{quote}{DEVELOPER}{quote}" in _all_text((template,)) for quote in "'\"")

    def _apply(self, request: GenerateRequest, messages: list[Any], kwargs: dict[str, Any]) -> str:
        template = request.chat_template or self._template
        if template is None and not self._tokenizer.chat_template:
            instead = "input" if request.sampling.pooling else "prompt" if request.tokens_only else "/v1/completions"
            raise Refusal(
                f"This model has no chat template: use {instead}, or start the server with --chat-template.",
                param="messages",
            )
        chat = {
            **kwargs,
            "conversation": messages,
            "chat_template": template,
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
        }
        try:
            return (self._process_of_given if request.chat_template else self._process).render(chat)
        except RenderLimit as limit:
            problem = f"The chat template was ended: {limit}"
        except RenderFailure as failure:
            verb = "refuses" if failure.refused else "cannot use"
            problem = f"The chat template {verb} these messages: {_short(failure)}"
        raise Refusal(problem, param="chat_template" if request.chat_template else "messages")

    def _render(self, chat: dict[str, Any]) -> str:
        """Render a chat; runs in the child process."""
        return str(self._tokenizer.apply_chat_template(tokenize=False, **chat))

    def _mark(self, value: Any) -> Any:
        """A copy with every special token in its strings marked. Names of fields are left alone."""
        if isinstance(value, str):
            return self._special.sub(f"{MARK_OPEN}\\g<0>{MARK_CLOSE}", value)
        if isinstance(value, dict):
            return {key: self._mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item) for item in value]
        return value

    def _split(self, text: str) -> tuple[str, ...]:
        """Text, marked token, text, ... A mark that the template tore off its token is dropped but still divides."""
        return tuple(piece or "" for piece in self._marked.split(text))


def own_template(setting: str) -> str:
    """The template that ``--chat-template`` names or is.

    Raises:
        TokenizerError: there is no such file, or it cannot be parsed: it would refuse every chat.
    """
    template = read_template(setting)
    try:
        Environment(extensions=[loopcontrols, _Generation]).parse(template)
    except TemplateSyntaxError as error:
        raise TokenizerError(f"--chat-template, line {error.lineno}: {error.message}") from error
    return template


def _plain_message(index: int, message: JsonValue) -> dict[str, Any]:
    """A message with its content as one string (text parts joined by newlines) and without null fields."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refusal(f"{where}: not an object with a role", param=where)
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = "\n".join(_text_of(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise Refusal(f"{where}.content: neither text nor a list of parts", param=f"{where}.content")
    return plain


def _told_by_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn developers' messages into the system's. As in vLLM, these become one message at the beginning, since many
    templates accept none elsewhere."""
    told = [message for message in messages if message["role"] in ("system", DEVELOPER)]
    if told == [messages[0]]:
        return [{**messages[0], "role": "system"}, *messages[1:]]
    content = "\n\n".join(filter(None, (message.get("content") for message in told)))
    others = [message for message in messages if message["role"] not in ("system", DEVELOPER)]
    return [{"role": "system", "content": content}, *others]


def _text_of(where: str, part: JsonValue) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text":
        raise Refusal(f"{where}: this model takes only parts of type 'text', not {str(kind)[:50]!r}", param=where)
    if not isinstance(text, str):
        raise Refusal(f"{where}.text: not a string", param=where)
    return text


def _checked_kwargs(kwargs: Mapping[str, JsonValue]) -> dict[str, Any]:
    """A client's template arguments: only names the template can read, none that steer the rendering itself."""
    for name in kwargs:
        if not name.isidentifier() or name.startswith("_") or name in RESERVED_KWARGS:
            raise Refusal(f"chat_template_kwargs: {name[:50]!r} cannot be set", param="chat_template_kwargs")
    return dict(kwargs)


def _all_text(value: Any) -> str:
    """All strings in ``value``, separated so that none begins in one and ends in the next."""
    return "\0".join(_strings(value))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "..."
