"""The file of API keys: what it may say, and that a change of it holds at once."""

from __future__ import annotations

import asyncio
import hashlib
import logging

import pytest

from pagebus.actors.settings import SettingsError
from pagebus.bus.codec import encode
from pagebus.web.access.auth import digest_of
from pagebus.web.access.key_file import KeyFile
from pagebus.web.app import IngressActor
from tests.helpers.waiting import until
from tests.web.fake_backend import Delta, batch

SECRET = "alices-long-secret"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[alice]\nkey = "{SECRET}"\nmax_requests = 1\n')
    return path


async def status(http, served, key, path="/v1/models", **options):
    headers = {"Authorization": f"Bearer {key}"}
    async with http.request("POST" if options else "GET", served.url + path, headers=headers, **options) as response:
        return response.status


def test_read(tmp_path):
    """A key or its digest, with limits; told once for each change of the file."""
    path = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"bobs-long-secret").hexdigest()
    path.write_text(
        f'[alice]\nkey = "{SECRET}"\nmax_tokens = 5\nweight = 2\ntokens_per_minute = 7\n[bob]\nsha256 = "{digest}"\n'
    )
    file = KeyFile(str(path))

    alice, bob = file.news()

    assert (alice.name, alice.digest, alice.max_requests, alice.max_tokens) == ("alice", digest_of(SECRET), None, 5)
    assert (alice.weight, alice.tokens_per_minute, bob.weight, bob.tokens_per_minute) == (2.0, 7, 1.0, None)
    assert bob.digest == digest_of("bobs-long-secret")
    assert file.news() is None
    path.write_text(f'[alice]\nkey = "{SECRET}2"\n')
    assert [key.name for key in file.news()] == ["alice"]
    assert SECRET not in repr(alice)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no keys"), ("[a", "not valid TOML"), ('a = "alices-long-secret"', "must be a table"),
        ("[a]", "needs a key"), ('[a]\nkey = "alices1"', "needs a key"), ('[a]\nkey = "alices long secret"', "needs"),
        ('[a]\nkey = 12345678', "needs a key"), ('[a]\nsha256 = "00"', "needs a key"),
        ('[a]\nkey = "alices-long-secret"\nsha256 = "00"', "needs a key"),
        ('[a]\nkey = "alices-long-secret"\nrate = 1', "unknown field 'rate'"),
        ('[a]\nkey = "alices-long-secret"\nprivate_cache = 1', "true or false"),
        ('[a]\nkey = "alices-long-secret"\noperator = "yes"', "true or false"),
        ('[""]\nkey = "alices-long-secret"', "name of a key"),
        ('["key 0"]\nkey = "alices-long-secret"', "name of a key"),
        ('[a]\nkey = "alices-long-secret"\nmax_tokens = 0', "positive"),
        ('[a]\nkey = "alices-long-secret"\ntokens_per_minute = 0.5', "positive"),
        ('[a]\nkey = "alices-long-secret"\nweight = 0', "above 0"),
        ('[a]\nkey = "alices-long-secret"\nweight = inf', "above 0"),
        ('[a]\nkey = "alices-long-secret"\nweight = true', "above 0"),
        ('[a]\nkey = "alices-long-secret"\nmax_requests = true', "positive"),
        ('[a]\nkey = "alices-long-secret"\n[b]\nkey = "alices-long-secret"', "are the same"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path, text, problem):
    """The error says what is wrong and never shows a key; it is told once."""
    path = tmp_path / "keys.toml"
    path.write_text(text)
    file = KeyFile(str(path))

    with pytest.raises(SettingsError, match=problem) as caught:
        file.news()

    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert file.news() is None


def test_no_file(tmp_path):
    """Without the file there is no start."""
    with pytest.raises(SettingsError, match="No such file"):
        KeyFile(str(tmp_path / "none")).news()


async def test_keys_of_both_kinds(serve, http, path):
    """Keys of the file and keys given as a setting are both valid."""
    served = await serve(api_key=("given",), api_key_file=str(path))

    assert [await status(http, served, key) for key in (SECRET, "given", "other")] == [200, 200, 401]


async def test_changes(serve, http, path, caplog):
    """New keys hold while the server runs; a broken file changes nothing; neither tells a key in the log."""
    caplog.set_level(logging.DEBUG)
    served = await serve(api_key_file=str(path))
    actor: IngressActor = served.actor
    keys, file = actor.context.keys, actor._key_file

    path.write_text("[alice")
    await actor._renew_keys(keys, file)
    assert await status(http, served, SECRET) == 200
    path.write_text('[bob]\nkey = "bobs-long-secret"\n')
    await until(lambda: [key.name for key in keys._keys] == ["bob"])

    assert [await status(http, served, key) for key in (SECRET, "bobs-long-secret")] == [401, 200]
    assert "secret" not in caplog.text


async def test_operators(serve, http, path):
    """What shows or ends the work of others is for keys given as a setting, and for those of the file that may."""
    path.write_text(f'[alice]\nkey = "{SECRET}"\n[olga]\nkey = "olgas-long-secret"\noperator = true\n')
    served = await serve(api_key=("given",), api_key_file=str(path))
    orders = ("/api/actors/scheduler/scheduler-0/stop", "/api/requests/cmpl-1/cancel")
    told = ("/api/events", "/api/history", "/api/blocks?replica=x", "/debug/state")

    assert {await status(http, served, SECRET, path) for path in told} == {403}
    assert {await status(http, served, SECRET, path, json={}) for path in orders} == {403}
    for key in ("given", "olgas-long-secret"):
        assert await status(http, served, key, "/api/history") == 200
        assert await status(http, served, key, "/api/requests/cmpl-1/cancel", json={}) == 200
    assert await status(http, served, SECRET) == 200


async def test_limit_of_a_key(serve, http, path):
    """A key that has what it may have is refused; others are not."""
    served = await serve(api_key=("given",), api_key_file=str(path), answers=False)
    ask = {"path": "/v1/completions", "json": {"prompt": "x"}}
    first = asyncio.create_task(status(http, served, SECRET, **ask))
    await served.backend.requested()

    assert await status(http, served, SECRET, **ask) == 429
    second = asyncio.create_task(status(http, served, "given", **ask))

    requests = await served.backend.requested(2)
    ends = (Delta(request.request_id, "x", 1, finish_reason="stop") for request in requests)
    await served.backend.send(served.address, batch(ends))
    assert await asyncio.gather(first, second) == [200, 200]


async def test_private_caches(serve, http, path):
    """Blocks of such a key are found by nobody else, whatever salt anybody gives; a salt of its own still divides."""
    path.write_text(
        "".join(f'[{name}]\nkey = "{name}-long-secret"\nprivate_cache = true\n' for name in ("alice", "bobby"))
    )
    served = await serve(api_key=("given",), api_key_file=str(path))
    for key in ("alice-long-secret", "bobby-long-secret", "given"):
        for salt in (None, "s"):
            body = {"prompt": "x", "cache_salt": salt}
            for _ in range(2):
                assert await status(http, served, key, path="/v1/completions", json=body) == 200

    salts = [request.cache_salt for request in served.backend.requests]

    assert salts[::2] == salts[1::2]
    assert len(set(salts)) == 6
    assert salts[8:] == [None, None, "s", "s"]


async def test_only_the_name_of_a_key_travels(serve, http, tmp_path):
    """Requests carry name and weight to the scheduler; the key itself is nowhere on the bus."""
    path = tmp_path / "keys.toml"
    path.write_text(f'[alice]\nkey = "{SECRET}"\nweight = 2.5\n')
    served = await serve(api_key_file=str(path))

    assert await status(http, served, SECRET, "/v1/completions", json={"prompt": "x"}) == 200

    (request,) = served.backend.requests
    assert (request.client, request.weight) == ("alice", 2.5)
    assert SECRET.encode() not in b"".join(encode(request).values())
