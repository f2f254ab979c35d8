"""Sequences that are kept to a grammar survive their executor: followed anew from their tokens, on another one."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import jsonschema_rs
import pytest
from tokenizers import Tokenizer

import pagebus.actors.shipped_model
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import StructuredOutput
from tests.helpers.waiting import LIMIT_S, eventually
from tests.system.harness import System, running

SHIPPED = Path(pagebus.actors.shipped_model.__file__).parent
SMALL = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1,
}  # fmt: skip
TOKENIZER = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
WORD = {
    "type": "object",
    "properties": {"word": {"type": "string", "pattern": "^[a-z]{8}$"}},
    "required": ["word"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": WORD, "minItems": 4, "maxItems": 4}
WANTED = StructuredOutput(kind="json", text=json.dumps(SCHEMA), field="test")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model with random weights and a real tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(json.loads((SHIPPED / "config.json").read_text()) | SMALL))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, tmp_path)
    return tmp_path


async def generate(system: System) -> list[list[int]]:
    prompts = [TOKENIZER.encode(text).ids for text in ("one", "two", "three", "four")]
    futures = [
        system.submit(prompt, temperature=1.0, seed=seed, max_tokens=400, ignore_eos=False, structured_output=WANTED)[1]
        for seed, prompt in enumerate(prompts)
    ]
    async with asyncio.timeout(LIMIT_S):
        return list(await asyncio.gather(*futures))


async def test_an_executor_dies(folder):
    """Half of the outputs are somewhere in their middle then: all are whole, valid, and what they would have been."""
    server = MemoryServer()
    options = {"executors": 2, "lease_ttl_s": 1.0, "load_format": "dummy", "dtype": "float32"}
    async with running(folder, lambda: MemoryBus(server), **options) as system:
        expected = await generate(system)
        begun = sum(map(len, system.collector.tokens.values()))
        again = asyncio.ensure_future(generate(system))

        async def is_under_way() -> bool:
            return sum(map(len, system.collector.tokens.values())) > begun + 40

        await eventually(is_under_way)
        await system.kill("executor-1")
        outputs = await again

    assert outputs == expected
    texts = [TOKENIZER.decode(tokens) for tokens in outputs]
    assert all(jsonschema_rs.is_valid(SCHEMA, json.loads(text)) for text in texts)
