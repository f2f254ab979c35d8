"""The exporter of spans behind ``--otlp-traces-endpoint``, if its packages are installed."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
EXPORTERS = {
    HTTP: ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "pagebus[otel]"),
    "grpc": ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "opentelemetry-exporter-otlp-proto-grpc"),
}
"""Module and package of the exporter, by protocol."""
SDK = "opentelemetry.sdk.trace"


def protocol() -> str:
    """The protocol that the environment asks for."""
    return next(filter(None, map(os.environ.get, PROTOCOL_VARIABLES)), HTTP)


def problem_of(endpoint: str) -> str | None:
    """Why nothing can be exported there, as far as that can be told without trying."""
    spoken = protocol()
    if spoken not in EXPORTERS:
        return f"{PROTOCOL_VARIABLES[0]} {spoken!r}: choose one of {', '.join(EXPORTERS)}"
    if not urlsplit(endpoint).scheme or not urlsplit(endpoint).netloc:
        return "needs a URL, like http://127.0.0.1:4318/v1/traces"
    if not _installed(SDK):
        return "needs OpenTelemetry's SDK: pip install 'pagebus[otel]'"
    module, package = EXPORTERS[spoken]
    return None if _installed(module) else f"needs the exporter for {spoken}: pip install '{package}'"


def make_exporter(endpoint: str) -> SpanExporter:
    """What else OpenTelemetry's own variables say (headers, certificates, timeout) holds."""
    module, _ = EXPORTERS[protocol()]
    return cast("SpanExporter", import_module(module).OTLPSpanExporter(endpoint=endpoint))


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False
