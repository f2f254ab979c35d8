"""Adapters of a deployment of processes whose executor has two ranks: over HTTP, at run time, and after a loss."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.chaos.deployment import deployed
from tests.helpers.lora.adapters import greedy, make_adapter, merged
from tests.helpers.model_factory import make_model
from tests.system.faults.test_ranks import pids, rank_of, until_new

PROMPT = [5, 9, 200, 31, 7]
ASKED = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.slow
async def test_load_serve_unload_and_a_killed_rank(tmp_path: Path) -> None:
    """All answers are those of the model with the adapter merged in; after a kill both ranks are others."""
    base = make_model(tmp_path / "model", "llama2", seed=3, num_attention_heads=4, num_key_value_heads=2)
    folders = {name: make_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate(("one", "two"), 1)}
    wanted = {name: greedy(merged(base, folder), [PROMPT], 6)[0] for name, folder in folders.items()}
    wanted["oracle"] = greedy(merged(base, None), [PROMPT], 6)[0]
    flags = "--tensor-parallel-size=2", "--enable-lora", f"--lora-modules=one={folders['one']}", "--skip-tokenizer-init"
    with deployed(tmp_path, *flags, "--dtype=float32", model=base) as deployment:
        async with aiohttp.ClientSession() as session:

            async def call(path: str, **body: Any) -> tuple[int, Any]:
                async with session.post(f"{deployment.url}{path}", json=body) as response:
                    return response.status, await response.json(content_type=None)

            async def check(*names: str) -> None:
                for name in names:
                    status, answer = await call("/v1/completions", model=name, **ASKED)
                    assert status == 200, answer
                    assert answer["choices"][0]["token_ids"] == wanted[name]

            await check("one", "oracle")
            path = str(folders["two"])
            async with session.post(
                f"{deployment.url}/v1/load_lora_adapter", json={"lora_name": "two", "lora_path": path}
            ) as response:
                assert response.status == 200, await response.text()
            await check("two", "one", "oracle", "two")  # one place, so that they come and go

            before = pids(deployment)
            rank_of(deployment, 1).kill()
            await until_new(deployment, before)
            await asyncio.to_thread(deployment.until_healthy)
            await check("one", "two", "oracle")

            async with session.post(f"{deployment.url}/v1/unload_lora_adapter", json={"lora_name": "two"}) as response:
                assert response.status == 200, await response.text()
            assert (await call("/v1/completions", model="two", **ASKED))[0] == 404
            await check("one")
        assert deployment.stop() == 0
