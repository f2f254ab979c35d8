"""What /debug/state tells, and what it does not."""

from __future__ import annotations

import orjson
import pytest

from pagebus.actors.settings import Settings
from pagebus.actors.settings.sources import shown
from pagebus.bus.contract import Entry, EntryId
from pagebus.bus.messages import StateRequested
from pagebus.web.observatory.observatory import picture
from tests.web.observatory.test_board import state

KEY = "a-very-secret-key"


async def test_all_there_is_to_know_without_secrets(serve, http) -> None:
    """Behind the key; actors, streams, settings and the scheduler, and not the key itself."""
    served = await serve(api_key=(KEY,))
    served.backend.answer = lambda asked: state({7: [0, 1]}) if isinstance(asked, StateRequested) else None
    await served.actor.bus.dead_letter("tokenizer", Entry("requests", EntryId(1), None), "odd")
    async with http.get(served.url + "/debug/state") as response:
        assert response.status == 401
    async with http.get(served.url + "/debug/state", headers={"Authorization": f"Bearer {KEY}"}) as response:
        assert response.status == 200
        text = await response.text()
        told = await response.json()

    assert KEY not in text
    assert told["settings"]["api_key"] == "***"
    assert told["versions"]["pagebus"] == served.actor.context.version
    assert {row["kind"] for row in told["actors"]} >= {"ingress", "scheduler"}
    assert {row["name"] for row in told["streams"]} >= {"requests", "tokenized", "control"}
    dead = [row for row in told["streams"] if row["name"].startswith("dead:")]
    assert dead == [{"name": "dead:tokenizer", "length": 1}], "where there are none, there is no line"
    assert told["scheduler"] == orjson.loads(orjson.dumps(picture(state({7: [0, 1]}))))
    assert [each["id"] for each in told["scheduler"]["requests"]] == ["request-7"]
    assert told["missing"] == []


@pytest.mark.parametrize(
    "bus", ["redis://user:secret@host/0", "redis+sentinel://h1,h2/main?sentinel_password=secret", "redis://host/0"]
)
def test_passwords_of_the_bus_are_not_shown(bus: str) -> None:
    """Wherever in a URL they are; a URL without one is."""
    assert shown(Settings(bus=bus))["bus"] == (bus if "secret" not in bus else "***")
