"""Adapters over HTTP: clients name them, operators load, reload and unload them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.lora.adapters import greedy, make_adapter, merged
from tests.helpers.model_factory import make_model
from tests.helpers.waiting import eventually
from tests.system.serving import Client, serving

PROMPT = [5, 9, 200, 31, 7]
ASKED = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama2", seed=3)


async def call(served: Client, path: str, **body: Any) -> tuple[int, Any]:
    async with served._session.post(f"{served.url}{path}", json=body) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


async def tokens(served: Client, model: str) -> list[int]:
    status, answer = await call(served, "/v1/completions", model=model, **ASKED)
    assert status == 200, answer
    assert answer["model"] == model
    return list(answer["choices"][0]["token_ids"])


def wanted(base: Path, adapter: Path | None) -> list[int]:
    return greedy(merged(base, adapter), [PROMPT], 6)[0]


async def test_the_life_of_an_adapter(base: Path, tmp_path: Path) -> None:
    first, second = (make_adapter(tmp_path / name, base, seed=seed) for name, seed in (("first", 1), ("second", 2)))
    options = {"enable_lora": True, "lora_modules": (f"one={first}",), "skip_tokenizer_init": True}
    async with serving(base, served_model_name=("base",), **options) as served:
        assert await tokens(served, "one") == wanted(base, first)
        assert await tokens(served, "base") == wanted(base, None)
        assert (await call(served, "/v1/completions", model="two", **ASKED))[0] == 404

        status, text = await call(served, "/v1/load_lora_adapter", lora_name="two", lora_path=str(second))
        assert (status, text) == (200, "Success: LoRA adapter 'two' added successfully.")
        assert await tokens(served, "two") == wanted(base, second)
        async with served._session.get(f"{served.url}/v1/models") as response:
            cards = {card["id"]: (card["root"], card["parent"]) for card in (await response.json())["data"]}
        assert cards == {"base": ("base", None), "one": (str(first), "base"), "two": (str(second), "base")}

        status, error = await call(served, "/v1/embeddings", model="one", input=PROMPT)
        assert (status, error["error"]["param"]) == (400, "model")
        status, error = await call(served, "/v1/load_lora_adapter", lora_name="one", lora_path=str(second))
        assert status == 400
        assert "has already been loaded" in error["error"]["message"]
        await call(served, "/v1/load_lora_adapter", lora_name="one", lora_path=str(second), load_inplace=True)
        assert await tokens(served, "one") == wanted(base, second)

        assert (await call(served, "/v1/unload_lora_adapter", lora_name="one"))[0] == 200
        status, error = await call(served, "/v1/completions", model="one", **ASKED)
        assert (status, error["error"]["reason"]) == (404, "model_not_found")
        assert (await call(served, "/v1/unload_lora_adapter", lora_name="one"))[0] == 404


async def test_what_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "large", base, seed=1, rank=17)
    async with serving(base, enable_lora=True, skip_tokenizer_init=True, served_model_name=("base",)) as served:
        for body, status, field, text in (
            ({"lora_path": str(adapter)}, 400, "lora_name", "must be provided"),
            ({"lora_name": "a"}, 400, "lora_path", "must be provided"),
            ({"lora_name": "a", "lora_path": str(tmp_path / "none")}, 404, "lora_path", "no adapter found"),
            ({"lora_name": "base", "lora_path": str(adapter)}, 400, "lora_name", "that of the model itself"),
            ({"lora_name": "a", "lora_path": str(adapter)}, 400, "lora_path", "rank 17, this server takes up to 16"),
        ):
            got, error = await call(served, "/v1/load_lora_adapter", **body)
            assert (got, error["error"]["param"], text in error["error"]["message"]) == (status, field, True), error
        got, error = await call(served, "/v1/unload_lora_adapter", lora_name="a")
        assert (got, error["error"]["param"]) == (404, "lora_name")


async def test_without_enable_lora(base: Path, tmp_path: Path) -> None:
    async with serving(base, skip_tokenizer_init=True) as served:
        status, error = await call(served, "/v1/load_lora_adapter", lora_name="a", lora_path=str(tmp_path))
        assert status == 400
        assert "--enable-lora" in error["error"]["message"]


async def test_a_watched_folder(base: Path, tmp_path: Path) -> None:
    """What lies there is served soon after the start, what is copied there later too, and what is gone is not."""
    folder = tmp_path / "watched"
    first = make_adapter(folder / "first", base, seed=1)
    options = {"enable_lora": True, "lora_resolver_cache_dir": str(folder), "skip_tokenizer_init": True}
    async with serving(base, served_model_name=("base",), **options) as served:
        await until_listed(served, "base", "first")
        assert await tokens(served, "first") == wanted(base, first)
        second = make_adapter(folder / "second", base, seed=2)
        await until_listed(served, "base", "first", "second")
        assert await tokens(served, "second") == wanted(base, second)
        shutil.rmtree(first)
        await until_listed(served, "base", "second")
        assert (await call(served, "/v1/completions", model="first", **ASKED))[0] == 404


async def until_listed(served: Client, *models: str) -> None:
    async def are_listed() -> bool:
        return [card["id"] for card in (await served.json("/v1/models"))["data"]] == [*models]

    await eventually(are_listed)
