"""/tokenize and /detokenize through the whole system."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import transformers

import pagebus.actors.shipped_model
from tests.system.serving import serving

MODEL = Path(pagebus.actors.shipped_model.__file__).parent
CHAT = [{"role": "user", "content": "What is wäter 你好?"}]


async def test_tokens_are_those_of_transformers() -> None:
    """Of texts and chats, with and without special tokens; the way back gives the text; nothing is generated."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    async with serving(MODEL) as client, aiohttp.ClientSession() as session:

        async def post(path: str, **body: object) -> dict[str, object]:
            async with session.post(f"{client.url}/{path}", json=body) as response:
                assert response.status == 200, await response.text()
                answer: dict[str, object] = await response.json()
                return answer

        text = "Once upon a tïme 🙂"
        for special in (True, False):
            told = await post("tokenize", prompt=text, add_special_tokens=special, return_token_strs=True)
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert told["tokens"] == ids
            assert told["count"] == len(ids)
            assert told["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
            assert (await post("detokenize", tokens=ids))["prompt"] == tokenizer.decode(ids)
        chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
        told = await post("tokenize", messages=CHAT)
        assert told["tokens"] == list(chat["input_ids"] if hasattr(chat, "keys") else chat)
        assert told["token_strs"] is None
        assert (await post("detokenize", tokens=[]))["prompt"] == ""
        async with session.post(f"{client.url}/detokenize", json={"tokens": [10**6]}) as response:
            assert response.status == 400
