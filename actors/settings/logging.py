"""Settings of logs on standard error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagebus.actors.settings.declaring import setting


def _check_endpoints(paths: Any) -> str | None:
    plain = all(path.strip().startswith("/") for path in str(paths).split(","))
    return None if plain else "an endpoint is a path like /health"


def _check_otlp(endpoint: Any) -> str | None:
    from pagebus.actors.settings.otlp import problem_of

    return problem_of(str(endpoint))


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """What is written to standard error."""

    log_level: str = setting("info", help="least severe lines to write", choices=("debug", "info", "warning", "error"))
    log_format: str = setting(
        "auto", help="auto: text on a terminal, JSON lines otherwise", choices=("auto", "console", "json")
    )
    enable_log_requests: bool = setting(
        False, help="write lines for every request: its parameters (with --log-level debug its prompt too) and its end"
    )
    enable_log_outputs: bool = setting(
        False, help="with --enable-log-requests, write a line for every output as it ends: its text and finish reason"
    )
    max_log_len: int | None = setting(
        None,
        help="characters of an output, or characters or token ids of a prompt, that are logged (default: all)",
        low=0,
        high=2**30,
    )
    disable_access_log_for_endpoints: str | None = setting(
        None,
        help="routes whose answers --enable-log-requests leaves out, separated by commas (/health,/metrics)",
        check=_check_endpoints,
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        help="URL of an OpenTelemetry collector for traces of requests (default: no traces)",
        check=_check_otlp,
    )
    span_dir: str | None = setting(
        None,
        help="folder to which scheduler and executors write spans of each step when they stop "
        "(default: nothing is noted)",
    )
