"""Rejects prompts that can never fit, by their length in characters, before they are tokenized or sent to the bus."""

from __future__ import annotations

from pagebus.web.http.errors import ApiError
from pagebus.web.requests.parsed_request import ParsedRequest, Prompt
from pagebus.web.requests.served_model import ServedModel

BYTES_PER_ID = 8
"""Approximate bytes of a token id in a body."""


def check_length(parsed: ParsedRequest, model: ServedModel, max_chars: int | None) -> None:
    """``max_chars``: a text of more fits into no context. What the model has said itself does not count: templates may
    leave it out.

    Raises:
        ApiError: 400, a prompt is hopelessly long.
    """
    if max_chars is None or parsed.truncate_prompt_tokens is not None:
        return
    needs = "" if model.pooler is not None else ", and at least one is needed for the output"
    for prompt in parsed.prompts:
        if num_chars(prompt) > max_chars:
            text = (
                f"This model's maximum context length is {model.max_model_len} tokens. However, your prompt has more "
                f"than {model.max_model_len} tokens{needs}. Please reduce the length of the prompt."
            )
            raise ApiError(400, text, param=prompt.path, code="context_length_exceeded")


def num_chars(prompt: Prompt) -> int:
    """Characters that will have to be encoded, at least."""
    if prompt.messages is None:
        return len(prompt.text or "") + len(prompt.second_text or "")
    return sum(len(message["content"]) for message in prompt.messages if message["role"] != "assistant")


def num_bytes(parsed: ParsedRequest, body_bytes: int | None) -> int:
    """About how long the message of each of the call's prompts is, which came in a body of so many bytes (None: not
    known)."""
    longest = max(_size(prompt) for prompt in parsed.prompts)
    return longest if body_bytes is None or len(parsed.prompts) > 1 else max(longest, body_bytes)


def _size(prompt: Prompt) -> int:
    ids = 0 if prompt.token_ids is None else len(prompt.token_ids)
    return num_chars(prompt) + BYTES_PER_ID * ids
