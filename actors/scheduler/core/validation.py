"""Validation: errors for requests that are rejected at once, because they are invalid or can never run."""

from __future__ import annotations

from collections.abc import Collection

from pagebus.actors.model.token_bits import fits
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Request
from pagebus.bus.messages import RequestFailed, TokenizedRequest
from pagebus.bus.messages.requests import MOST_PREDICTION_TOKENS
from pagebus.bus.messages.segments import without_segments

MAX_SEQUENCES = 64


def _bad(request_id: str, message: str, param: str) -> RequestFailed:
    return RequestFailed(
        request_id=request_id, status=400, error_type="invalid_request_error", message=message, param=param
    )


def of_message(message: TokenizedRequest, vocab_size: int | None = None) -> RequestFailed | None:
    """The error for an invalid message. Tokenizers send none of these; a scheduler must not fail on one all the
    same."""
    sampling = message.sampling
    if not len(message.prompt_token_ids):
        return _bad(message.request_id, "The prompt is empty.", "prompt")
    if not 1 <= sampling.n <= MAX_SEQUENCES:
        return _bad(message.request_id, f"n is {sampling.n}, it must be from 1 to {MAX_SEQUENCES}.", "n")
    if sampling.beam_width and not sampling.n <= sampling.beam_width <= MAX_SEQUENCES:
        text = f"The beam width is {sampling.beam_width}, it must be from n ({sampling.n}) to {MAX_SEQUENCES}."
        return _bad(message.request_id, text, "best_of")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        return _bad(message.request_id, f"max_tokens is {sampling.max_tokens}, it must be at least 1.", "max_tokens")
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= (most := vocab_size or 2**31 - 1):
            return _bad(message.request_id, f"{name} is {count}, it must be from 0 to {most}.", name)
    if len(message.prediction_token_ids) > MOST_PREDICTION_TOKENS:
        return _bad(message.request_id, f"prediction has more than {MOST_PREDICTION_TOKENS} tokens.", "prediction")
    if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**63:
        return _bad(message.request_id, "The seed is no signed 64-bit number.", "seed")
    return None if vocab_size is None else _of_tokens(message, vocab_size)


def _of_tokens(message: TokenizedRequest, vocab_size: int) -> RequestFailed | None:
    """The error for a token id outside the vocabulary, which would end the executor that checks it."""
    sampling, prompt = message.sampling, message.prompt_token_ids
    prompt = without_segments(prompt) if sampling.in_one_step else prompt
    lists = {"prompt": (int(prompt.min()), int(prompt.max()))} | sampling.token_ids
    if len(message.prediction_token_ids):
        lists["prediction"] = (int(message.prediction_token_ids.min()), int(message.prediction_token_ids.max()))
    if sampling.allowed_tokens and not fits(sampling.allowed_tokens, vocab_size):
        lists["allowed_token_ids"] = (vocab_size,)
    for name, ids in lists.items():
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            return _bad(
                message.request_id, f"{name}: a token id is outside the vocabulary (0 to {vocab_size - 1}).", name
            )
    return None


def of_size(request: Request, limit_tokens: int, replicas: Collection[Replica]) -> RequestFailed | None:
    """The error for a request that fits on no replica; None while there are no replicas."""
    if not replicas:
        return None
    if request.adapter is not None and not any(replica.adapters.capacity for replica in replicas):
        return _bad(request.id, "No executor takes adapters (--enable-lora).", "model")
    num_prompt, width = len(request.prompt), request.sampling.beam_width
    for replica in replicas:
        num_tokens = min(limit_tokens, replica.max_model_len) - 1
        num_blocks = replica.most_blocks(request, num_tokens, num_tokens if request.sampling.in_one_step else 1)
        num_blocks += replica.adapters.num_blocks(request.digest)
        fits = num_prompt <= num_tokens and num_blocks <= replica.pool.num_blocks and width <= replica.slots.num_slots
        if fits and (num_prompt <= replica.budget or not request.sampling.in_one_step):
            return None
    longest = max(replica.max_model_len for replica in replicas)
    if num_prompt + 1 > longest:
        text = f"The prompt has {num_prompt} tokens, and this model's context holds {longest}, output included."
        return _bad(request.id, text, "prompt")
    budget = max(replica.budget for replica in replicas)
    if num_prompt > budget and request.sampling.in_one_step:
        text = f"The prompt has {num_prompt} tokens, which this model computes in one step, and a step has {budget}."
        return _bad(request.id, text, "prompt")
    most = max(replica.slots.num_slots for replica in replicas)
    if width > most:
        return _bad(request.id, f"A search of {width} beams needs as many slots at once; this server has {most}.", "n")
    largest = max(replica.pool.num_blocks // replica.num_pages * replica.block_size for replica in replicas)
    text = (
        f"The prompt ({num_prompt} tokens) and max_tokens ({min(limit_tokens, longest) - num_prompt})"
        f"{f', for each of {width} beams,' if width else ''}{', with the adapter,' if request.digest else ''} "
        f"need more than the key-value cache holds ({largest} tokens): ask for fewer tokens, or give the server a "
        "larger cache."
    )
    return _bad(request.id, text, "max_tokens")


def of_load(request: Request, max_num_queued_requests: int) -> RequestFailed:
    """The error for a full queue."""
    return RequestFailed(
        request_id=request.id,
        status=429,
        error_type="rate_limit_exceeded",
        message=f"{max_num_queued_requests} requests are waiting already; please try again later.",
    )


def of_operator(request: Request) -> RequestFailed:
    """The error for a request cancelled by an operator."""
    text = "The request was cancelled by an operator of the server."
    return RequestFailed(request_id=request.id, status=409, error_type="request_cancelled", message=text)


def of_hold(request: Request) -> RequestFailed:
    """The error for a request that arrives while an operator holds the work."""
    text = "An operator has paused the server; please try again later."
    return RequestFailed(request_id=request.id, status=503, error_type="server_error", message=text)


def of_losses(request: Request) -> RequestFailed:
    """The error for a request whose executors were lost repeatedly."""
    text = "The request failed repeatedly and was given up."
    return RequestFailed(request_id=request.id, status=500, error_type="internal_error", message=text)


def of_adapter(request: Request, reason: str) -> RequestFailed:
    """The error for a request whose adapter cannot be read any more."""
    name = "" if request.adapter is None else request.adapter.name
    text = f"The adapter {name} cannot be loaded: {reason}"
    return RequestFailed(request_id=request.id, status=500, error_type="internal_error", message=text, param="model")
