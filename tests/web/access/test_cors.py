"""Pages of other origins: none may use the API unless it was allowed."""

from __future__ import annotations

import pytest

from pagebus.actors.settings import Settings, SettingsError

ORIGIN = "https://app.example"
ASKS = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os"}  # fmt: skip


def allowed(response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("Access-Control-")}


async def test_off_by_default(serve, http):
    """Nothing is said to browsers, so they refuse."""
    served = await serve()

    async with http.get(served.url + "/v1/models", headers={"Origin": ORIGIN}) as response:
        assert (response.status, allowed(response)) == (200, {})
    async with http.options(served.url + "/v1/completions", headers=ASKS) as response:
        assert (response.status, allowed(response)) == (405, {})


@pytest.mark.parametrize(("origins", "said"), [((ORIGIN, "http://other"), ORIGIN), (("*",), "*")])
async def test_allowed(serve, http, origins, said):
    """A preflight needs no key, a request does; whole answers, streams and errors may be read."""
    served = await serve(allowed_origins=origins, api_key=("secret",))
    key = {"Origin": ORIGIN, "Authorization": "Bearer secret"}

    async with http.options(served.url + "/v1/completions", headers=ASKS) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == said
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
    for stream in (False, True):
        body = {"prompt": "x", "stream": stream}
        async with http.post(served.url + "/v1/completions", json=body, headers=key) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (200, said)
    async with http.post(served.url + "/v1/completions", json={}, headers={"Origin": ORIGIN}) as response:
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (401, said)
        assert "Access-Control-Allow-Credentials" not in response.headers


async def test_other_origins(serve, http):
    """Only the listed ones; caches are told that it depends."""
    served = await serve(allowed_origins=(ORIGIN,))

    async with http.get(served.url + "/v1/models", headers={"Origin": ORIGIN + ".evil.example"}) as response:
        assert allowed(response) == {}
        assert response.headers["Vary"] == "Origin"
    async with http.get(served.url + "/", headers={"Origin": ORIGIN}) as response:
        assert response.headers["Vary"] == "Accept, Accept-Encoding, Origin"
        assert "X-Should-Retry" in response.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize(
    ("site", "origin", "status"),
    [("cross-site", "https://evil.example", 403), ("same-site", "http://127.0.0.1:3000", 403),
     ("cross-site", None, 403), ("cross-site", ORIGIN, 200),
     ("same-origin", "http://127.0.0.1", 200), ("none", None, 200)],
)  # fmt: skip
async def test_what_other_pages_send_without_asking(serve, http, site, origin, status):
    """A browser posts plain text from any page; nothing comes of it unless the page's origin is allowed."""
    served = await serve(allowed_origins=(ORIGIN,))
    headers = {"Sec-Fetch-Site": site, "Content-Type": "text/plain"} | ({"Origin": origin} if origin else {})

    async with http.post(served.url + "/v1/completions", data='{"prompt": "x"}', headers=headers) as response:
        assert response.status == status
    assert len(served.backend.requests) == (status == 200)
    async with http.get(served.url + "/v1/models", headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://evil.example", 403), ("http://127.0.0.1:1", 403), ("null", 403), (ORIGIN, 200), (None, 200),
     ("http://{host}", 200), ("https://{host}", 200), ("http://{host}.evil.example", 403),
     ("vscode-webview://0a1b", 200)],
)  # fmt: skip
async def test_browsers_that_only_tell_the_origin(serve, http, origin, status):
    """To other machines over plain HTTP they do not say whether a page is the server's own: its origin does."""
    served = await serve(allowed_origins=(ORIGIN,))
    headers = {"Origin": origin.format(host=served.url.removeprefix("http://"))} if origin else {}

    async with http.post(served.url + "/v1/completions", data='{"prompt": "x"}', headers=headers) as response:
        assert response.status == status
    assert len(served.backend.requests) == (status == 200)


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", '["*"]', "https://a b", "null", ""])
def test_bad_origins(origin):
    """What could never match is refused at the start."""
    with pytest.raises(SettingsError, match="allowed-origins"):
        Settings(allowed_origins=(origin,))
