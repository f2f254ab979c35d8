"""Admission control: bounds the requests and tokens under way, for the whole ingress and for each API key.

Admission is decided before tokenization. A call is charged n x (prompt + max_tokens); the tokens of a text are
estimated from its bytes. The charge is returned when the call ends.

A rejected client is told when there will be room. By Little's law, load drains at (load under way) / (mean duration of
a call). Each rejection is placed behind the earlier ones, so that clients do not all return at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pagebus.web.access.auth import ANYBODY, ApiKey
from pagebus.web.access.fair_admission import FairAdmission
from pagebus.web.http.errors import ApiError, overloaded
from pagebus.web.http.limits import BYTES_PER_TOKEN, MESSAGE_TOKENS, UNSTATED_OUTPUT_TOKENS
from pagebus.web.requests.parsed_request import ParsedRequest, Prompt
from pagebus.web.requests.served_model import ServedModel

NEWEST_SHARE = 0.1
"""Weight of one more call in the mean of how long calls take."""
MAX_RETRY_AFTER_S = 30.0
FAR_TOO_LONG = 4
"""Multiple of the context length beyond which no text of so many estimated tokens can fit."""


class Load:
    """The load of one key, or of all keys together. A limit of None means no limit."""

    def __init__(self, max_requests: int | None, max_tokens: int | None, clock: Callable[[], float]) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = self.tokens = 0
        self._clock = clock
        self._mean_s: float | None = None
        """Mean duration of calls, in seconds."""
        self._promised_s = 0.0
        """Until this time, room is promised to clients that were told to retry."""

    def check(self, requests: int, tokens: int) -> None:
        """Check whether this much more fits.

        Raises:
            ApiError: 429; 400 if it is too much for an empty server.
        """
        for what, used, more, limit in (
            ("requests", self.requests, requests, self.max_requests),
            ("tokens", self.tokens, tokens, self.max_tokens),
        ):
            if limit is None or used + more <= limit:
                continue
            if more > limit:
                text = f"The request asks for {more} {what}; at most {limit} may be under way at once."
                raise ApiError(400, text, code=f"too_many_{what}")
            raise overloaded(what, limit, self.retry_after_s(tokens))

    def part(self, requests: int, tokens: int) -> float:
        """This load as a fraction of the limits."""
        return max(requests / (self.max_requests or math.inf), tokens / (self.max_tokens or math.inf))

    def enter(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens

    def leave(self, requests: int, tokens: int, seconds: float) -> None:
        """Remove the load of a call that took ``seconds``."""
        self.requests -= requests
        self.tokens -= tokens
        self._mean_s = seconds if self._mean_s is None else self._mean_s + NEWEST_SHARE * (seconds - self._mean_s)

    def retry_after_s(self, tokens: int) -> int:
        """Seconds until there is room for another call of ``tokens`` tokens (0: as many as the average call)."""
        now_s = self._clock()
        share = tokens / self.tokens if tokens and self.tokens else 1 / max(self.requests, 1)
        wait_s = 1.0 if self._mean_s is None else share * self._mean_s
        self._promised_s = min(max(self._promised_s, now_s) + wait_s, now_s + MAX_RETRY_AFTER_S)
        return max(1, math.ceil(self._promised_s - now_s))


class Rate:
    """Tokens per minute of one key: a bucket that holds a minute's worth and fills all the time."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._tokens = float(per_minute)
        self._seen_s = clock()

    def charge(self, tokens: int) -> None:
        """Charge a call.

        Raises:
            ApiError: 429, there are not so many; 400, there never are.
        """
        if tokens > self.per_minute:
            text = f"The request asks for {tokens} tokens; this key has {self.per_minute} per minute."
            raise ApiError(400, text, code="too_many_tokens")
        now_s = self._clock()
        self._tokens = min(self._tokens + (now_s - self._seen_s) * self.per_minute / 60, self.per_minute)
        self._seen_s = now_s
        if tokens > self._tokens:
            wait_s = math.ceil((tokens - self._tokens) * 60 / self.per_minute)
            raise overloaded("tokens per minute", self.per_minute, max(1, wait_s))
        self._tokens -= tokens

    def refund(self, tokens: int) -> None:
        """Return tokens that a call was charged for but did not use."""
        self._tokens = min(self._tokens + tokens, self.per_minute)


def of_client(parsed: ParsedRequest, key: ApiKey) -> ParsedRequest:
    """The call with the attributes of its key: name, weight, and a private salt if its cache is private."""
    if key is ANYBODY:
        return parsed
    return replace(parsed, client=key.name, weight=key.weight, cache_salt=key.salted(parsed.cache_salt))


@dataclass(slots=True)
class Charge:
    """The final token count of a call, once known, and whether its client has received everything. ``stays_s``: the
    client has disconnected and may return for so long, while the call continues."""

    used_tokens: int | None = None
    delivered: bool = False
    stays_s: float = 0.0

    def settle(self, used_tokens: int | None) -> None:
        """It has used so many tokens; None: nobody knows."""
        self.used_tokens = used_tokens

    def leave(self, *, delivered: bool, stays_s: float) -> None:
        """Its client has everything, or is away and may return for ``stays_s``."""
        self.delivered, self.stays_s = delivered, stays_s


@dataclass(slots=True)
class Held:
    """The charge of a call and the key that pays it; while its client is disconnected, until when."""

    loads: tuple[Load, ...]
    key: ApiKey
    part: float
    requests: int
    tokens: int
    began_s: float
    until_s: float = 0.0


class Admission:
    """All loads of one ingress."""

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total = Load(max_requests, max_tokens, clock)
        self._fair_admission = FairAdmission(clock)
        self._of_key: dict[str, Load] = {}
        self._rates: dict[str, Rate] = {}
        self._away: dict[tuple[str, int, int], Held] = {}
        """Charges of calls that continue without their clients, by name, requests and tokens; the first to disconnect
        comes first."""

    @property
    def open_tokens(self) -> int:
        """Tokens charged for calls that go on, with their clients or without."""
        self._forget_away()
        return self.total.tokens

    def check_room(self, key: ApiKey, name: str = "") -> None:
        """Check the limits before the body is read. A call whose ``name`` ends like this may already be under way.

        Raises:
            ApiError: 429, not even the smallest call would be taken.
        """
        try:
            self._check(key, 1, 0)
        except ApiError:
            if not name or not any(each.endswith(name) for each, *_ in self._away):
                raise

    @contextmanager
    def admitted(self, key: ApiKey, parsed: ParsedRequest, model: ServedModel, name: str = "") -> Iterator[Charge]:
        """Hold the charge of a call while it is under way. Its handler records the final token count in the ``Charge``.
        A call with a ``name`` whose client has returned is charged already.

        Raises:
            ApiError: 429 or 400, it is too much.
        """
        requests, tokens = len(parsed.prompts), cost_of(parsed, model)
        place, rate, charge = (name, requests, tokens), self._rate_of(key), Charge()
        was_away = self._away.pop(place, None) if name else None
        held = was_away or self._enter(key, requests, tokens, rate)
        try:
            yield charge
        finally:
            if charge.stays_s:
                held.until_s = self._clock() + charge.stays_s
            if charge.stays_s or (was_away and not charge.delivered):  # which goes on, for all we know
                self._stay_away(place, held)
            else:
                self._leave(held)
                if rate is not None and charge.used_tokens is not None:
                    rate.refund(tokens - charge.used_tokens)

    def _enter(self, key: ApiKey, requests: int, tokens: int, rate: Rate | None) -> Held:
        self._check(key, requests, tokens)
        if rate is not None:
            rate.charge(tokens)
        loads, part = (*self._own_loads(key), self.total), self.total.part(requests, tokens)
        for load in loads:
            load.enter(requests, tokens)
        self._fair_admission.enter(key, part)
        return Held(loads, key, part, requests, tokens, self._clock())

    def _leave(self, held: Held) -> None:
        for load in held.loads:
            load.leave(held.requests, held.tokens, self._clock() - held.began_s)
        self._fair_admission.leave(held.key, held.part)

    def _stay_away(self, place: tuple[str, int, int], held: Held) -> None:
        if (other := self._away.pop(place, None)) is not None:  # two connections for one call
            self._leave(other)
        self._away[place] = held

    def _forget_away(self) -> None:
        """Release the charges of calls whose clients did not return in time; those calls have been aborted."""
        now_s = self._clock()
        while self._away:
            first = next(iter(self._away))
            if self._away[first].until_s > now_s:
                return
            self._leave(self._away.pop(first))

    def _rate_of(self, key: ApiKey) -> Rate | None:
        if key.tokens_per_minute is None:
            return None
        rate = self._rates.get(key.name)
        if rate is None or rate.per_minute != key.tokens_per_minute:  # the file may have changed
            rate = self._rates[key.name] = Rate(key.tokens_per_minute, self._clock)
        return rate

    def _check(self, key: ApiKey, requests: int, tokens: int) -> None:
        """Check the key's own limits first, which are narrower; then the total; then fair admission."""
        self._forget_away()
        for load in self._own_loads(key):
            load.check(requests, tokens)
        total, part = self.total, self.total.part(requests, tokens)
        try:
            total.check(requests, tokens)
            if self._fair_admission.is_kept(key, part, 1 - total.part(total.requests, total.tokens)):
                raise overloaded("requests", total.max_requests or 0, total.retry_after_s(tokens))
        except ApiError as error:
            if error.status == 429:
                self._fair_admission.wait(key, part)
            raise

    def _own_loads(self, key: ApiKey) -> tuple[Load, ...]:
        if key.max_requests is None and key.max_tokens is None:
            return ()
        load = self._of_key.get(key.name)
        if load is None:
            load = self._of_key[key.name] = Load(key.max_requests, key.max_tokens, self._clock)
        load.max_requests, load.max_tokens = key.max_requests, key.max_tokens  # the file may have changed
        return (load,)


def cost_of(parsed: ParsedRequest, model: ServedModel) -> int:
    """An upper estimate of the tokens of a call, before its texts are tokenized. A text that is far too long will be
    rejected, but occupies the bus until then: it is charged by its size."""
    most = model.max_model_len or math.inf
    sampling = parsed.sampling
    output = sampling.max_tokens
    if output is None:
        least = max(UNSTATED_OUTPUT_TOKENS, sampling.min_tokens)
        output = model.max_model_len or least if sampling.ignore_eos else least
    for given in (parsed.tools, parsed.documents):
        output += _estimate(str(given)) if given else 0  # which the template writes into the prompt
    lengths = [num_prompt_tokens(prompt) for prompt in parsed.prompts]
    costs = (max(min(length + output, most), length // FAR_TOO_LONG) for length in lengths)
    return max(sampling.n, sampling.beam_width) * int(sum(costs))


def num_prompt_tokens(prompt: Prompt) -> int:
    """Exact for token ids, estimated for text."""
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    if prompt.messages is not None:
        return sum(MESSAGE_TOKENS + _estimate(_text_of(message)) for message in prompt.messages)
    return _estimate(prompt.text or "") + _estimate(prompt.second_text or "")


def _text_of(message: Mapping[str, Any]) -> str:
    """All text of a message that a template may include."""
    more = [str(message[name]) for name in ("tool_calls", "reasoning_content") if name in message]
    return "".join([message["content"], *more])


def _estimate(text: str) -> int:
    num_bytes = len(text) if text.isascii() else len(text.encode())
    return -(-num_bytes // BYTES_PER_TOKEN)
