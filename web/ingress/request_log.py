"""Logs requests and their outcomes (``--enable-log-requests``).

Prompts are logged only at level ``debug``, and outputs only with ``--enable-log-outputs``, each as the value of one
key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from msgspec import structs

from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.logs import Log, Whole
from pagebus.bus.messages import GenerateRequest, SamplingParams
from pagebus.web.calls.call import Call, LoggedChoice

_DEFAULTS = SamplingParams()


class RequestLog:
    """``max_len``: the most characters of a text, or tokens of a prompt, that are logged; None: all. Answers of
    ``unlogged`` routes are not logged."""

    def __init__(
        self, log: Log, *, prompts: bool, outputs: bool, max_len: int | None, unlogged: frozenset[str]
    ) -> None:
        self.outputs = outputs
        self._log = log
        self._prompts = prompts
        self._max_len = max_len
        self._unlogged = unlogged

    def received(self, request: GenerateRequest) -> None:
        """A request was sent on its way."""
        said = {"request_id": request.request_id, "params": params_of(request.sampling)}
        if request.client:
            said["client"] = request.client
        if self._prompts:
            said["prompt"] = Whole(self._prompt_of(request))
        self._log.info("request received", **said)

    def ended(self, call: Call) -> None:
        """Log the outputs of a finished call; an unfinished output was cut off."""
        for choice in call.choices:
            if isinstance(choice, LoggedChoice) and (choice.num_tokens or choice.finish_reason):
                reason = choice.finish_reason or ("abort" if call.failure is None else "error")
                said = {"request_id": choice.request.request_id, "index": choice.index, "finish_reason": reason}
                text = Whole("".join(choice.said)[: self._max_len])
                self._log.info("output", **said, tokens=choice.num_tokens, output=text)

    def answered(self, ids: Mapping[str, Any], method: str, handler: str, status: int) -> None:
        """The end of an HTTP request, of any route; ``ids`` say which."""
        if handler not in self._unlogged:
            self._log.info("request", **ids, method=method, handler=handler, status=status)

    def _prompt_of(self, request: GenerateRequest) -> str:
        if request.prompt is None and request.messages is None:
            return str(request.prompt_token_ids[: self._max_len].tolist())
        text = request.prompt if request.prompt is not None else orjson.dumps(request.messages).decode()
        return text[: self._max_len]


def params_of(sampling: SamplingParams) -> str:
    """Numeric parameters that differ from their defaults (others may contain the client's text)."""
    values = structs.asdict(sampling).items()
    told = (
        f"{name}={value}"
        for name, value in values
        if isinstance(value, bool | int | float) and value != getattr(_DEFAULTS, name)
    )
    return " ".join(told)


def open_request_log(settings: Settings, log: Log) -> RequestLog | None:
    """The request log, or None if it is disabled."""
    if not settings.enable_log_requests:
        return None
    unlogged = (settings.disable_access_log_for_endpoints or "").split(",")
    return RequestLog(
        log,
        prompts=settings.log_level == "debug",
        outputs=settings.enable_log_outputs,
        max_len=settings.max_log_len,
        unlogged=frozenset(map(str.strip, unlogged)),
    )
