"""`LLM` with adapters: each prompt is continued by the one that is named for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagebus import LLM, LoRARequest, RequestOutput, SamplingParams
from pagebus.actors.model.config import SHIPPED_MODEL
from tests.helpers.lora.adapters import greedy, make_adapter, merged

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What is water?"}]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / str(seed), SHIPPED_MODEL, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", threads=1, max_num_seqs=8, enable_lora=True, dtype="float32") as made:
        yield made


def check(outputs: list[RequestOutput], folders: list[Path | None]) -> None:
    """Each output is what the model of transformers gives with that adapter."""
    for output, folder in zip(outputs, folders, strict=True):
        told = greedy(merged(SHIPPED_MODEL, folder), [output.prompt_token_ids], 6)[0]
        assert output.outputs[0].token_ids == told
        assert (output.lora_request and output.lora_request.lora_path) == (folder and str(folder))


def test_adapters_of_prompts_and_chats(llm: LLM, adapters: list[Path]) -> None:
    first, second = adapters
    one, two = LoRARequest("one", 1, str(first)), LoRARequest("two", 2, str(second))
    check(llm.generate(["water is"] * 3, GREEDY, lora_request=[one, None, two]), [first, None, second])
    check(llm.chat([QUESTION, QUESTION], GREEDY, lora_request=one), [first, first])
    check(llm.chat(QUESTION, GREEDY), [None])
    check(llm.generate("water is", GREEDY, lora_request=LoRARequest("one", 1, str(second))), [second])


def test_what_is_refused(llm: LLM, adapters: list[Path]) -> None:
    with pytest.raises(ValueError, match="no adapter found at /nowhere"):
        llm.generate("water is", GREEDY, lora_request=LoRARequest("none", 1, "/nowhere"))
    with pytest.raises(ValueError, match="2 prompts need one lora_request, or one each; got 1"):
        llm.generate(["a", "b"], GREEDY, lora_request=[None])
    with pytest.raises(ValueError, match="two adapters are called x"):
        llm.generate(["a", "b"], GREEDY, lora_request=[LoRARequest("x", 1, str(each)) for each in adapters])
    for arguments in (("x", 0, "/x"), ("", 1, "/x"), ("x", 1, "")):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(*arguments)
