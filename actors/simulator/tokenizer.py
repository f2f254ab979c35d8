"""The way of requests to the scheduler: a tokenizer takes what is there, up to a batch, and publishes it together."""

from __future__ import annotations

from collections import deque

from pagebus.actors.simulator.simulation import Simulation
from pagebus.bus.messages import RequestFailed, TokenizedRequest

BATCH = 128
"""Requests that a tokenizer reads at once, at most."""


class ModelTokenizer:
    """One tokenizer, which takes ``token_s`` seconds for each prompt token; 0: requests go straight on. It refuses what
    does not fit into a context of ``max_model_len`` tokens."""

    def __init__(self, simulation: Simulation, token_s: float, max_model_len: int) -> None:
        self._simulation = simulation
        self._token_s = token_s
        self._max_model_len = max_model_len
        self._waiting: deque[TokenizedRequest] = deque()
        self._is_busy = False

    def take(self, at_s: float, request: TokenizedRequest) -> None:
        """A request has come."""
        if len(request.prompt_token_ids) + (request.sampling.max_tokens or 0) > self._max_model_len:
            self._simulation.observer.failed(at_s, _too_long(request))
            return
        if not self._token_s:
            self._simulation.at(at_s, request)
            return
        self._waiting.append(request)
        if not self._is_busy:
            self._begin(at_s)

    def _begin(self, at_s: float) -> None:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        num_tokens = sum(len(request.prompt_token_ids) for request in batch)
        self._is_busy = True
        self._simulation.at(at_s + num_tokens * self._token_s, lambda done_s: self._publish(done_s, batch))

    def _publish(self, at_s: float, batch: list[TokenizedRequest]) -> None:
        for request in batch:
            self._simulation.at(at_s, request)
        self._is_busy = False
        if self._waiting:
            self._begin(at_s)


def _too_long(request: TokenizedRequest) -> RequestFailed:
    text = "Prompt and max_tokens do not fit into the context."
    return RequestFailed(
        request_id=request.request_id, status=400, error_type="BadRequestError", message=text, param="max_tokens"
    )
