"""Answers of ``/inference/v1/generate`` as token ids, whole and in chunks."""

from __future__ import annotations

from typing import Any

from pagebus.web.answers.detailed import DetailedCompletionChunks, shown_choices
from pagebus.web.answers.sse import DONE, event, usage_of
from pagebus.web.answers.timings import timings_of
from pagebus.web.calls.answer_details import AnswerDetails, PromptInfo, Token, prompt_logprobs
from pagebus.web.calls.call import Call, Choice

NOTHING = {"routed_experts": None, "sampling_mask": None, "weight_versions": None}
"""Fields of a choice that are not supported here and that vLLM sends as null."""


def token_logprobs(tokens: list[Token], count: int) -> dict[str, Any]:
    """The log probabilities of tokens by their ids, each with itself and the ``count`` most likely ones."""
    content = []
    for token in tokens:
        likeliest = list(token.likeliest(count))
        own = next((rank for rank, (token_id, _) in enumerate(likeliest, 1) if token_id == token.id), None)
        first = {"token_id": token.id, "logprob": token.logprob, "rank": own}
        others = [
            {"token_id": token_id, "logprob": value, "rank": rank}
            for rank, (token_id, value) in enumerate(likeliest, 1)
            if token_id != token.id
        ]
        content.append({**first, "top_logprobs": [first, *others]})
    return {"content": content}


def token_choice(index: int, choice: Choice, details: AnswerDetails) -> dict[str, Any]:
    """What is new of a choice."""
    choice.take_text()
    tokens = choice.take_tokens()
    body: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    body["token_ids"] = [token.id for token in tokens]
    body["logprobs"] = None if details.logprobs is None else token_logprobs(tokens, details.logprobs)
    return {**body, **NOTHING}


def whole(call: Call, details: AnswerDetails, public_id: str, created_s: int, model: str) -> dict[str, Any]:
    """The whole answer."""
    prompt: PromptInfo | None = call.requests[0].prompt
    scores = None
    if prompt is not None and details.prompt_logprobs is not None:
        scores = prompt_logprobs(prompt, call.texts, details.prompt_logprobs)
    return {
        "request_id": public_id,
        "model": model,
        "created": created_s,
        "output_mode": "tokens",
        "choices": [token_choice(index, choice, details) for index, choice in shown_choices(call, details)],
        "usage": usage_of(call.requests),
        "prompt_token_ids": None if prompt is None else prompt.ids,
        "prompt_logprobs": scores,
        "prompt_token_id_logprobs": None,
        "mm_placeholders": None,
        "metrics": timings_of(call) if call.tells_times else None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


class TokenChunks(DetailedCompletionChunks):
    """Chunks of token ids; the first one tells the prompt's."""

    def _choice(self, choice: Choice) -> bytes:
        request, first = choice.request, choice.index not in self._offsets
        if request.needs_prompt and request.prompt is None:
            return b""
        if not (choice.tokens or choice.finish_reason is not None):
            return b""
        self._offsets[choice.index] = 0
        ids = request.prompt.ids if first and request.prompt is not None else None
        return self._event([token_choice(choice.index, choice, self._details)], prompt_token_ids=ids)

    def last(self, call: Call) -> bytes:
        if not self.options.usage:
            return DONE
        metrics = timings_of(call) if call.tells_times else None
        return self._event([], usage=usage_of(call.requests), metrics=metrics) + DONE

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        told = {"usage": None, "prompt_token_ids": None, "mm_placeholders": None, "metrics": None, **more}
        return event({"request_id": self.head["id"], "output_mode": "tokens", "choices": choices, **told})
