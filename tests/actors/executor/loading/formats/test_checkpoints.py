"""Every format, token for token against transformers with the dequantized weights: whole engines on a CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pagebus.actors.model.config import ModelError
from tests.actors.executor.models.test_families import MAX_TOKENS, SETTINGS, reference_tokens
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden
from tests.helpers.quantized.checkpoints import quantize, tensors_of, write
from tests.helpers.quantized.llama4 import put_together, taken_apart
from tests.helpers.quantized.packers import PACKERS

pytestmark = pytest.mark.share(6)

FIELDS = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = (17, 70)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden(tmp_path_factory.mktemp("dense"), "qwen3", FIELDS)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(300) for _ in range(count)] for count in PROMPTS]


def tokens(folder: Path, **changes: object) -> list[list[int]]:
    driver = Driver(folder, **SETTINGS | changes)
    scheduler = driver.scheduler(64)
    sequences = [scheduler.add(prompt, MAX_TOKENS) for prompt in prompts()]
    driver.drive(scheduler)
    driver.close()
    return [sequence.output for sequence in sequences]


def check(quantized: Path, dense: Path) -> None:
    """Equal as far as transformers leaves no doubt."""
    expected = reference_tokens(dense, prompts())
    assert sum(map(len, expected)) >= 30
    assert all(len(answer) >= 4 for answer in expected)
    got = tokens(quantized)
    assert [answer[: len(known)] for answer, known in zip(got, expected, strict=True)] == expected


@pytest.mark.parametrize("name", PACKERS)
def test_greedy_tokens_equal_the_dequantized_model(name: str, model: Path, tmp_path: Path) -> None:
    """Fused products, grouped heads, a head that is not quantized."""
    check(*quantize(model, tmp_path, PACKERS[name]))


@pytest.mark.parametrize("name", ["fp8-blocks", "ct-int4-zeros", "gptq-4-act-order", "awq", "ct-nvfp4", "bnb-nf4"])
def test_experts(name: str, tmp_path: Path) -> None:
    """Each expert's modules go straight into the stacked layout."""
    fields = {**FIELDS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    check(*quantize(make_golden(tmp_path / "model", "qwen3_moe", fields), tmp_path, PACKERS[name]))


LLAMA4 = {**FIELDS, "num_local_experts": 4, "intermediate_size": 64, "intermediate_size_mlp": 64}


def llama4(name: str, folder: Path) -> tuple[Path, Path, Path]:
    """The model as it is published, the same quantized with its experts apart, and what that means."""
    stacked = make_golden(folder / "model", "llama4_text", LLAMA4)
    apart = write(folder / "apart", stacked, taken_apart(tensors_of(stacked)))
    return stacked, *quantize(apart, folder, PACKERS[name])


@pytest.mark.parametrize("name", ["ct-fp8", "ct-int4-zeros"])
def test_experts_of_llama4(name: str, tmp_path: Path) -> None:
    """llm-compressor takes them apart, so that each has rows of outputs."""
    stacked, quantized, dense = llama4(name, tmp_path)
    check(quantized, write(tmp_path / "stacked", stacked, put_together(tensors_of(dense))))


def test_experts_of_llama4_in_one_tensor(tmp_path: Path) -> None:
    """They lie column by column there, which no reader expects."""
    stacked, quantized, _ = llama4("ct-fp8", tmp_path)
    experts = {name: tensor for name, tensor in tensors_of(stacked).items() if ".experts." in name}
    rest = {name: tensor for name, tensor in tensors_of(quantized).items() if ".experts." not in name}
    with pytest.raises(ModelError, match="gate_up_proj: experts that are stored column by column are not read"):
        tokens(write(tmp_path / "mixed", quantized, rest | experts))
