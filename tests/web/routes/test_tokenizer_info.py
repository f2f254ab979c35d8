"""``/tokenizer_info``: only where the server was told to show it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagebus.actors.model.config import SHIPPED_MODEL
from pagebus.actors.model.tokenizer import load_tokenizer
from pagebus.actors.settings import Settings
from pagebus.web.requests.served_model import load_served_model
from tests.web.fake_backend import MODEL


@pytest.mark.parametrize("info", [None, {"eos_token": "</s>", "chat_template": "{{ messages }}"}])
async def test_the_route(serve, http, info):
    """What is known of the tokenizer, or a 404 that says which setting is missing; with the server's keys."""
    served = await serve(model=replace(MODEL, tokenizer_info=info), api_key=("k",))
    async with http.get(served.url + "/tokenizer_info") as response:
        assert response.status == 401
    async with http.get(served.url + "/tokenizer_info", headers={"Authorization": "Bearer k"}) as response:
        status, told = response.status, await response.json()
    if info is None:
        assert (status, told["error"]["reason"]) == (404, "not_enabled")
    else:
        assert (status, told) == (200, info)


async def test_of_the_shipped_model():
    """As transformers reads it; the setting's chat template is the one in force."""
    tokenizer = load_tokenizer(SHIPPED_MODEL)
    told = (await load_served_model(Settings(enable_tokenizer_info_endpoint=True), 5)).tokenizer_info
    other = Settings(enable_tokenizer_info_endpoint=True, chat_template="{{ messages }}")

    names = ("bos_token", "eos_token", "chat_template", "model_max_length")
    assert {name: told[name] for name in names} == {name: getattr(tokenizer, name) for name in names}
    assert (await load_served_model(other, 5)).tokenizer_info == {**told, "chat_template": "{{ messages }}"}
    assert (await load_served_model(Settings(), 5)).tokenizer_info is None
