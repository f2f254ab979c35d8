"""What a page is told of a deployment once."""

from __future__ import annotations

import pytest

from pagebus.actors.settings import Settings
from pagebus.web.observatory.facts import facts_of, redis_options
from pagebus.web.requests.served_model import ServedModel


@pytest.mark.parametrize(
    ("bus", "options"),
    [
        ("unix:///tmp/a b/redis.sock", ["-s", "/tmp/a b/redis.sock"]),
        ("redis://:secret@redis:6380/2", ["-u", "redis://redis:6380/2"]),
        ("redis://localhost", ["-u", "redis://localhost"]),
        ("redis+sentinel://a,b/main", None), ("memory://", None), ("", None),
    ],
)  # fmt: skip
def test_how_redis_is_reached(bus: str, options: list[str] | None) -> None:
    """As redis-cli takes it, without the password."""
    assert redis_options(bus) == options


@pytest.mark.parametrize("enabled", [False, True])
def test_whether_there_may_be_adapters(enabled: bool) -> None:
    """So the page need not ask for them where there are none."""
    assert facts_of(Settings(enable_lora=enabled), ServedModel(("m",)), "ingress-0")["takes_adapters"] is enabled


def test_defaults_and_targets() -> None:
    """Those of the model, and those that were given."""
    model = ServedModel(("m",), default_sampling={"temperature": 0.2}, max_model_len=100)
    facts = facts_of(Settings(itl_target_ms=20.0), model, "ingress-0")
    assert (facts["defaults"], facts["targets"], facts["max_model_len"]) == (
        {"temperature": 0.2},
        {"itl_ms": 20.0},
        100,
    )
