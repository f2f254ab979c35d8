"""Facts about a deployment that stay constant while a page is connected."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pagebus.actors.runtime.version import version
from pagebus.actors.settings import Settings
from pagebus.web.requests.served_model import ServedModel


def facts_of(settings: Settings, model: ServedModel, ingress: str) -> dict[str, Any]:
    """The ``hello`` event, but for its columns."""
    targets = {"ttft_ms": settings.ttft_target_ms, "itl_ms": settings.itl_target_ms}
    return {
        "version": version(),
        "model": model.name,
        "max_model_len": model.max_model_len,
        "defaults": dict(model.default_sampling),
        "targets": {name: value for name, value in targets.items() if value is not None},
        "deployment": settings.name,
        "ingress": ingress,
        "takes_batches": settings.files_dir is not None,
        "takes_adapters": settings.enable_lora,
        "restarts_alone": not (settings.bus or "").startswith("memory:"),
        "redis": redis_options(settings.bus or ""),
    }


def redis_options(bus: str) -> list[str] | None:
    """How ``redis-cli`` reaches the bus, without its password; None if that is no Redis."""
    parts = urlsplit(bus)
    if parts.scheme == "unix":
        return ["-s", parts.path]
    if parts.scheme not in ("redis", "rediss"):
        return None
    host = parts.netloc.rpartition("@")[2]
    return ["-u", urlunsplit((parts.scheme, host, parts.path, "", ""))]
