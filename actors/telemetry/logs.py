"""Logging: structlog everywhere, text on a terminal and JSON lines otherwise, always on standard error.

What clients send appears only as the value of a key, never in the event text, and every value is cut to ``MAX_VALUE``
characters, unless it is marked as :class:`Whole`. The libraries' own loggers (aiohttp, asyncio, transformers) go
through the same formatting; messages about malformed HTTP, which anybody on the network can cause, are limited in rate.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from pagebus.bus.hidden_imports import hide_imports

with hide_imports("rich"):  # for tracebacks on a terminal, which are formatted otherwise here
    import structlog
    from structlog.typing import EventDict, Processor, WrappedLogger

MAX_VALUE = 200
"""Characters of one logged value."""
OWN_LOGGER = "pagebus"
OWN_KEYS = ("event", "timestamp", "level", "exception")
LIMITED_LOGGERS = ("aiohttp.server", "aiohttp.web", "aiohttp.access", "asyncio")
LIMIT_INTERVAL_S = 10.0

Log = structlog.stdlib.BoundLogger


class Whole(str):
    """A value that is logged as long as it is."""


class Stream(Protocol):
    """Where lines go: a file, or something that writes like one."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...

    def isatty(self) -> bool: ...


def configure(
    level: str = "info", fmt: str = "auto", *, stream: Stream | None = None, whole_process: bool = True
) -> None:
    """Set up logging for this process. ``fmt`` is ``auto``, ``console`` or ``json``; ``stream`` defaults to stderr.

    In a host program's process (not ``whole_process``) only our own lines are configured, and only if the program has
    not set up structlog, which then writes them.
    """
    if not whole_process and structlog.is_configured():
        return
    out: Stream = stream if stream is not None else sys.stderr
    console = fmt == "console" or (fmt == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if console else "iso", utc=not console),
        structlog.processors.format_exc_info,
        cut_values,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _renderer(console, out)],
    )
    handler.setFormatter(formatter)
    root, own = logging.getLogger(), logging.getLogger(OWN_LOGGER)
    for logger in (root, own):
        for old in list(logger.handlers):
            if getattr(old, "pagebus", False):
                logger.removeHandler(old)
    handler.pagebus = True  # type: ignore[attr-defined]
    chosen = root if whole_process else own
    chosen.addHandler(handler)
    own.setLevel(logging.NOTSET)
    chosen.setLevel(getattr(logging, level.upper()))
    own.propagate = whole_process
    if whole_process:
        _calm_libraries(level)


def _renderer(console: bool, out: Stream) -> Processor:
    if not console:
        return structlog.processors.JSONRenderer(serializer=_to_json)
    colors = not os.environ.get("NO_COLOR") and (out.isatty() or bool(os.environ.get("FORCE_COLOR")))
    return structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0)


def _to_json(value: Any, default: Callable[[Any], Any] | None = None, **_: Any) -> str:
    import orjson

    try:
        return orjson.dumps(value, default=default or str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # an integer beyond 64 bits, or half a character: the line would be lost
        return json.dumps(value, default=default or str)


def _calm_libraries(level: str) -> None:
    """Libraries speak from warnings on (from info on when debugging), and cannot be made to flood the log."""
    quiet = logging.INFO if level == "debug" else logging.WARNING
    for name in ("aiohttp", "asyncio", "httpx", "urllib3", "huggingface_hub", "transformers", "redis", "filelock"):
        logging.getLogger(name).setLevel(quiet)
    for name in LIMITED_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(old, RateLimit) for old in logger.filters):
            logger.addFilter(RateLimit(LIMIT_INTERVAL_S))


def get_logger(**bound: Any) -> Log:
    """A logger with ``bound`` on every line."""
    return cast(Log, structlog.get_logger(OWN_LOGGER, **bound))


def cut_values(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Cut every string a caller gave to ``MAX_VALUE`` characters, and take the line breaks out."""
    for key, value in event.items():
        if key.startswith("_") or key in OWN_KEYS:
            continue
        if isinstance(value, str):
            event[key] = _printable(value) if isinstance(value, Whole) else _cut(value)
        elif value is not None and not isinstance(value, bool | int | float):
            event[key] = _cut(str(value))
    return event


def _cut(text: str) -> str:
    return _printable(text if len(text) <= MAX_VALUE else text[:MAX_VALUE] + f"... ({len(text)} characters)")


def _printable(shown: str) -> str:
    return shown if shown.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


class RateLimit(logging.Filter):
    """Lets one record with the same text template through per interval, and says how many were left out."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        template = str(record.msg)[:MAX_VALUE]
        if len(self._seen) > 100:
            self._seen.clear()
        last_s, left_out = self._seen.get(template, (-self._interval_s, 0))
        if now - last_s < self._interval_s:
            self._seen[template] = (last_s, left_out + 1)
            return False
        self._seen[template] = (now, 0)
        if left_out:
            record.msg = f"{record.msg} ({left_out} more like this were left out)"
        return True
