"""Lines about requests: what is in them, and that prompts are in them only where that was asked for."""

from __future__ import annotations

import pytest

from actors.settings import Settings, SettingsError

PROMPT = 'a "quoted"\nline\x1b[2J ' + "and more " * 60


async def ask(http, served, path="/v1/completions", **body):
    async with http.post(served.url + path, json=body) as response:
        assert response.status == 200, await response.text()


def told(lines, *names):
    return [[line.get(name) for name in names] for line in lines() if line["event"] == "request received"]


@pytest.mark.parametrize(
    ("max_log_len", "shown"), [(None, [PROMPT, "[5, 6, 7]"]), (12, [PROMPT[:12], "[5, 6, 7]"]), (2, ["a ", "[5, 6]"])]
)
async def test_prompts(serve, http, lines, max_log_len, shown):
    """On one line with the parameters, as a value that can be read back; as much of it as may be."""
    served = await serve(enable_log_requests=True, log_level="debug", max_log_len=max_log_len)
    await ask(http, served, prompt=PROMPT, max_tokens=3, temperature=0, stop=["secret"])
    await ask(http, served, prompt=[5, 6, 7])
    texts = [text.replace("\n", "\\n").replace("\x1b", "\\x1b") for text in shown]
    params = ["max_tokens=3 temperature=0.0", ""]
    assert told(lines, "prompt", "params") == [list(pair) for pair in zip(texts, params, strict=True)]
    assert not any("secret" in str(line) for line in lines())


async def test_chats(serve, http, lines):
    """Messages as JSON."""
    served = await serve(enable_log_requests=True, log_level="debug", max_log_len=32)
    await ask(http, served, "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    assert told(lines, "prompt") == [['[{"role":"user","content":"hello"}]'[:32]]]


async def test_no_prompt_unless_asked_for(serve, http, lines):
    """At the usual level only the parameters are told."""
    served = await serve(enable_log_requests=True)
    await ask(http, served, prompt=PROMPT, n=2)
    assert told(lines, "prompt", "params") == [[None, "n=2"]]
    assert "and more" not in str(lines())


async def test_nothing_by_default(serve, http, lines):
    """Neither of requests nor of answers, whatever the level."""
    served = await serve(log_level="debug")
    await ask(http, served, prompt=PROMPT)
    assert not [line for line in lines() if line["event"].startswith("request")]
    assert "and more" not in str(lines())


async def test_answers(serve, http, lines):
    """Routes whose answers nobody wants to see are left out."""
    served = await serve(enable_log_requests=True, disable_access_log_for_endpoints="/health, /metrics")
    for path in ("/health", "/metrics", "/version", "/v1/models"):
        async with http.get(served.url + path):
            pass
    ends = [(line["handler"], line["status"]) for line in lines() if line["event"] == "request"]
    assert ends == [("/version", 200), ("/v1/models", 200)]


def test_an_endpoint_that_is_none():
    """It would never match."""
    with pytest.raises(SettingsError, match="--disable-access-log-for-endpoints"):
        Settings(disable_access_log_for_endpoints="health")
