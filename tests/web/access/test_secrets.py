"""What is secret shows nowhere: not in logs, errors, metrics or listings."""

from __future__ import annotations

import pytest

from pagebus.actors.runtime.process import make_bus
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.contract import BusError
from pagebus.bus.redis.url import parse_redis_url

KEY, PASSWORD, PROMPT = "a-very-secret-key", "s3cretpassw0rd", "what nobody else should read"


async def test_logs_of_requests(serve, http, capfd):
    """Neither keys nor query strings nor prompts are logged, whatever becomes of the request."""
    served = await serve(api_key=(KEY,), enable_log_requests=True)
    good, wrong = ({"Authorization": f"Bearer {key}"} for key in (KEY, KEY + "x"))
    seen = []
    for headers, path, body in (
        (good, f"/v1/completions?key={KEY}", {"prompt": PROMPT}),
        (good, f"/v1/completions?key={KEY}", {"prompt": PROMPT, "n": KEY}),
        (wrong, f"/v1/completions?key={KEY}", {"prompt": PROMPT}),
        (good, f"/{KEY}", {"prompt": PROMPT}),
    ):
        async with http.post(served.url + path, json=body, headers=headers) as response:
            seen.append(response.status)
    for path in ("/metrics", "/health"):
        async with http.get(served.url + path) as response:
            assert KEY not in await response.text()
    await served.stop()

    assert seen == [200, 400, 401, 404]
    told = "".join(capfd.readouterr())
    assert "request_id" in told
    assert KEY not in told
    assert PROMPT not in told


@pytest.mark.parametrize(
    "url",
    [f"redis://u:{PASSWORD}@127.0.0.1:1/0", f"unix://u:{PASSWORD}@/nowhere.sock",
     f"redis+sentinel://u:{PASSWORD}@127.0.0.1:1/main?sentinel_password={PASSWORD}"],
)  # fmt: skip
async def test_the_password_of_redis(url, capfd):
    """It is not in what is said of a server that does not answer."""
    assert PASSWORD not in repr(parse_redis_url(url))
    bus = make_bus(Settings(bus=url))
    bus._connect_timeout_s = 0.0
    with pytest.raises(BusError) as caught:
        await bus.connect()
    await bus.close()
    assert PASSWORD not in str(caught.value) + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "url", [f"redis://u:{PASSWORD}@h:port", f"redis://u:{PASSWORD}@h?no_such=1", f"http://:{PASSWORD}@h"]
)
def test_the_password_of_a_url_that_is_wrong(url):
    """Nor in the error about the URL."""
    with pytest.raises(SettingsError) as caught:
        make_bus(Settings(bus=url))
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("mark", "/?#[")
@pytest.mark.parametrize("piece", ["pa55w0rd", "5550123"])
@pytest.mark.parametrize(
    "form",
    ["redis://:{}@redis:6379/0", "redis://u:{}@redis", "rediss://:{}@h", "unix://:{}@/r.sock",
     "redis+sentinel://:{}@h1,h2:5/main", "redis://:a@{}@redis:6379/0"],
)  # fmt: skip
def test_a_password_that_is_not_escaped(form, piece, mark):
    """No piece of it is taken for a host, a port, a database or an option, or told; the text says how to write it."""
    for password in (f"{piece}{mark}x", f"x{mark}{piece}", f"{piece}{mark}{piece}=1"):
        with pytest.raises(SettingsError, match=r"%2F.*--redis-password") as caught:
            make_bus(Settings(bus=form.format(password)))
        assert piece not in str(caught.value)


@pytest.mark.parametrize("form", ["redis://redis:6379/0", "rediss://u@h", "unix:///r.sock", "redis+sentinel://h1,h2/m"])
def test_a_password_of_its_own_needs_no_escapes(form):
    """Whatever is in it, it is the one that Redis is told; one in the URL comes first."""
    password = "@ / # % ? : [ ] ' \" \\ + & = ü"
    bus = make_bus(Settings(bus=form, redis_password=password))
    assert bus._target.options["password"] == password
    assert password not in repr(bus._target)
    assert make_bus(Settings(bus="redis://:mine@h", redis_password=password))._target.options["password"] == "mine"
