"""A server of OpenAI's API over HTTP, as far as the commands in a terminal need it."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from pagebus.actors.settings import SettingsError

CONNECT_S = 10.0
DONE = b"[DONE]"
MAX_SHOWN = 500
"""Characters of an answer that is no error of OpenAI's shape."""
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class ApiFailure(Exception):
    """The server cannot be reached, or has answered with an error; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream brings. ``usage`` comes once, at the end, from servers that tell it."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None


class Api:
    """Used as an asynchronous context manager. ``base_url`` ends with ``/v1``, as for OpenAI's clients.

    Raises:
        SettingsError: that is no address.
    """

    def __init__(self, base_url: str, api_key: str | None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise SettingsError(f"--url {base_url}: an address begins with http:// or https://")
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(force_close=True)  # a stream that was stopped leaves no connection behind
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None,
                        trace: TracebackType | None) -> None:  # fmt: skip
        await self._http.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside its context"
        return self._session

    @property
    def root(self) -> str:
        """Where the routes are that are not OpenAI's."""
        return self.base_url.removesuffix("/v1")

    async def first_model(self) -> str:
        """The name of the first model that is served."""
        data = await self.get_json(f"{self.base_url}/models")
        try:
            return str(data["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ApiFailure(f"{self.base_url}/models names no model") from None

    async def get_json(self, url: str) -> Any:
        """The answer of a route, as JSON."""
        try:
            async with self._http.get(url) as response:
                return _parsed(await _checked(response), url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    async def complete(self, body: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """A streamed completion."""
        async for data in self.events("POST", f"{self.base_url}/completions", _streamed(body)):
            yield _piece(data, lambda choice: (choice.get("text") or "", ""))

    async def chat(self, body: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """A streamed answer of the assistant."""

        def read(choice: Mapping[str, Any]) -> tuple[str, str]:
            delta = choice.get("delta") or {}
            return delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""

        async for data in self.events("POST", f"{self.base_url}/chat/completions", _streamed(body)):
            yield _piece(data, read)

    async def events(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> AsyncGenerator[Any, None]:
        """The data of all events of a stream, until ``[DONE]`` or its end. Names of events are under ``event``."""
        try:
            async with self._http.request(method, url, json=body) as response:
                if response.status != 200:
                    await _checked(response)
                rest = b""
                async for data in response.content.iter_any():
                    *events, rest = _EVENT_END.split(rest + data)
                    for event in events:
                        payload, name = _read_event(event)
                        if payload == DONE:
                            return
                        if payload:
                            found = _parsed(payload, url)
                            yield {"event": name, "data": found} if name else found
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> ApiFailure:
        if isinstance(error, aiohttp.ClientConnectorError):
            why = os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
            return ApiFailure(f"there is no server at {self.base_url} ({why})")
        return ApiFailure(f"{self.base_url}: {str(error) or type(error).__name__}")


def _streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def _read_event(event: bytes) -> tuple[bytes, str]:
    data, name = [], ""
    for line in event.splitlines():
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode(errors="replace")
    return b"\n".join(data), name


def _piece(data: Any, read: Any) -> Piece:
    if "error" in data:
        raise ApiFailure(_message(data))
    choices = data.get("choices")
    if not choices:
        return Piece(usage=data.get("usage"))
    text, reasoning = read(choices[0])
    return Piece(text, reasoning, choices[0].get("finish_reason"), data.get("usage"))


async def _checked(response: aiohttp.ClientResponse) -> bytes:
    """The body of an answer.

    Raises:
        ApiFailure: it is an error.
    """
    body = await response.read()
    if response.status == 200:
        return body
    try:
        text = _message(orjson.loads(body))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = body.decode(errors="replace")[:MAX_SHOWN]
    raise ApiFailure(f"{text or response.reason} (status {response.status})")


def _message(data: Any) -> str:
    """Of an error: OpenAI's shape, or a text."""
    error = data["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def _parsed(body: bytes, url: str) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiFailure(f"{url} does not answer with JSON: {error}") from None
