"""Rejects prompts that can never fit, and answers that would be far too long, by the length of prompts in characters,
before these are tokenized or sent to the bus."""

from __future__ import annotations

from pagebus.web.http.errors import ApiError, bad_field
from pagebus.web.requests.parsed_request import ParsedRequest, Prompt
from pagebus.web.requests.served_model import ServedModel

BYTES_PER_ID = 8
"""Approximate bytes of a token id in a body."""
CHARS_PER_TOKEN = 4
"""About, of most texts."""
MOST_REPEATED = 2**21
"""Log probabilities of prompts in an answer with several choices, which take about 200 MB."""


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


def check_repeats(parsed: ParsedRequest) -> None:
    """Each choice repeats the log probabilities of its prompt.

    Raises:
        ApiError: 400, the answer would be hopelessly long.
    """
    count, told = parsed.sampling.n, parsed.sampling.prompt_logprobs
    if count == 1 or told is None:
        return
    repeated = count * (told + 1) * sum(map(_num_tokens, parsed.prompts))
    if repeated > MOST_REPEATED:
        problem = f"each choice repeats the log probabilities of its prompt, about {repeated} in all"
        raise bad_field("n", f"{problem}, at most {MOST_REPEATED}; ask for them with n = 1")


def _num_tokens(prompt: Prompt) -> int:
    """About how many a prompt has."""
    return num_chars(prompt) // CHARS_PER_TOKEN if prompt.token_ids is None else len(prompt.token_ids)


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
