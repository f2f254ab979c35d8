"""Opens tracing if it is enabled: the only module that imports OpenTelemetry, an optional dependency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagebus.actors.runtime.version import version
from pagebus.actors.settings import Settings
from pagebus.actors.settings.otlp import make_exporter
from pagebus.actors.telemetry.logs import Log

if TYPE_CHECKING:
    from pagebus.web.telemetry.tracing import Tracing


def open_tracing(settings: Settings, model: str, log: Log, *, queued: bool = False) -> Tracing | None:
    """None if nobody wants traces. ``queued``: what is traced was taken off a stream, no client waits for it."""
    if settings.otlp_traces_endpoint is None:
        return None
    from opentelemetry.trace import SpanKind

    from pagebus.web.telemetry.tracing import Tracing

    kind = SpanKind.CONSUMER if queued else SpanKind.SERVER
    return Tracing(make_exporter(settings.otlp_traces_endpoint), model, version(), log, kind)
