"""API keys: which routes are open, and what is a key."""

from __future__ import annotations

import pytest

from pagebus.web.access.auth import OPEN_ROUTES, OPERATOR_ROUTES
from pagebus.web.app import ROUTES

KEYS = ("first-key", "second-key")


def test_open_routes():
    """The list of routes that need no key is this one; a new route needs a key unless this test changes."""
    paths = {route.path for route in ROUTES if route.name in OPEN_ROUTES}

    service = {"/health", "/livez", "/readyz", "/ping", "/version", "/load", "/metrics", "/docs"}
    assert paths == service | {"/", "/static/{path:.+}"}


def test_operator_routes():
    """All of the page's API and of support's is for operators only, and what steers the whole deployment."""
    paths = {route.path for route in ROUTES if route.path.startswith(("/api/", "/debug/"))}
    paths |= {"/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping"}
    paths |= {"/server_info", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}

    assert {route.path for route in ROUTES if route.name in OPERATOR_ROUTES} == paths


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401), ("Bearer first-key", 200), ("bearer second-key", 200), ("Bearer  second-key ", 200),
        ("Bearer", 401), ("Bearer ", 401), ("first-key", 401), ("Basic first-key", 401), ("Bearer first-keyx", 401),
        ("Bearer first-ke", 401), ("Bearer FIRST-KEY", 401), ("Bearer \u00e9", 401),
    ],
)  # fmt: skip
async def test_keys(serve, http, header, status):
    """One of the keys, as a bearer token, exactly."""
    served = await serve(api_key=KEYS)
    headers = {} if header is None else {"Authorization": header}

    async with http.get(served.url + "/v1/models", headers=headers) as response:
        body = await response.json()
        assert response.status == status
        if status == 401:
            assert body["error"]["reason"] == "invalid_api_key"
            assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_routes_with_keys(serve, http):
    """Open routes answer without a key; all others, also those that do not exist, do not."""
    served = await serve(api_key=KEYS)

    for path in ("/", "/static/css/base.css", "/health", "/livez", "/readyz", "/ping", "/version", "/metrics", "/docs"):
        async with http.get(served.url + path) as response:
            assert response.status == 200, path
    for path in (
        "/api/events",
        "/api/history",
        "/openapi.json",
        "/v1/models",
        "/v1/models/fake-model",
        "/nothing",
        "//health",
        "/health/",
        "/v1/../health/x",
    ):
        async with http.get(served.url + path) as response:
            assert response.status == 401, path
    async with http.post(served.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 401
    assert served.backend.requests == []


async def test_no_keys(serve, http):
    """Without --api-key nothing is asked."""
    served = await serve()

    async with http.get(served.url + "/v1/models", headers={"Authorization": "Bearer whatever"}) as response:
        assert response.status == 200
