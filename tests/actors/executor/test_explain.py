"""``pagebus explain`` says what the engine does: asked of its chooser, and held against what it launches."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.bench.driver.shapes import SHAPES
from pagebus.actors.commands.cli import main
from pagebus.actors.executor.batch.batch import PersistentBatch
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.device import resolve_dtype
from pagebus.actors.executor.explain import DECODES, MIXED, PROMPTS, AbsentEngine
from pagebus.actors.executor.loading.compile_command import parse_target
from pagebus.actors.executor.loading.dry_run import META, make_runner
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings
from pagebus.kernels.attention.choice import PATHS, AttentionPath
from pagebus.kernels.attention.forms.form import DecodeForm, DecodeHeads
from pagebus.kernels.attention.forms.tables import replace_bucket
from pagebus.kernels.common.target import Target, compile_for
from pagebus.kernels.common.user_tables import Tuned, read_user_tables, user_path
from pagebus.kernels.linear.shapes import Product
from pagebus.kernels.linear.tables import merge_table
from pagebus.kernels.moe.choice import choose_experts
from pagebus.kernels.moe.launch.shapes import Shape
from tests.helpers.engine_driver import HandScheduler
from tests.helpers.model_factory import make_golden
from tests.kernels.warm import run

pytestmark = pytest.mark.share(6)

TARGETS = {"sm_80": Target(80, 108), "sm_89": Target(89, 142), "sm_90": Target(90, 132)}
SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 5000,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 5000,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 704, "shared_expert_intermediate_size": 2816,
    "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 5000,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
STARCODER = SMALL | {"architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
FP8 = SMALL | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
AWQ = SMALL | {
    "quantization_config": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["self_attn.o_proj"],
    },
}  # fmt: skip
CHUNKS = SMALL | {
    "architectures": ["Llama4ForCausalLM"], "head_dim": 128, "num_hidden_layers": 4, "attention_chunk_size": 512,
    "num_local_experts": 16, "intermediate_size_mlp": 1024,
}  # fmt: skip
MODELS = {
    "moe": MOE, "small": SMALL, "gemma": GEMMA, "starcoder": STARCODER, "chunks": CHUNKS,
    "fp8": FP8, "awq": AWQ,
    **{
        name: SHAPES[name] | {"num_hidden_layers": 3}
        for name in ("llama8b", "gptoss20b", "gptoss20b-mxfp4", "deepseek-v2-lite")
    },
}  # fmt: skip
"""Kernels do not depend on how many layers there are; which steps have graphs does."""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform")


@pytest.fixture(autouse=True)
def _no_target_is_left() -> Iterator[None]:
    yield
    compile_for(None)
    read_user_tables(None)


@pytest.fixture(params=["small", "llama8b"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Only a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[request.param]))
    return tmp_path


def explained(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> dict[str, Any]:
    assert main(["explain", str(folder), "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def work_of(batch: PersistentBatch, decodes: int, prompt_tokens: int) -> StepWork:
    """What a plan of so many decodes and a prompt becomes."""
    limits = batch.limits
    scheduler = HandScheduler(20_000, limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens)
    batch.reset()
    for _ in range(decodes):
        scheduler.add([1], 4)
    if decodes and (plan := scheduler.plan()) is not None:
        batch.apply(plan)
    if prompt_tokens:
        scheduler.add([1] * prompt_tokens, 4)
    plan = scheduler.plan()
    assert plan is not None
    return batch.apply(plan)


@needs_triton
@pytest.mark.parametrize("changes", [{}, {"enforce_eager": True}, {"deterministic": True}, {"kv_cache_dtype": "int8"}])
@pytest.mark.parametrize("name", TARGETS)
def test_it_is_what_an_engine_is_told(folder: Path, name: str, changes: dict[str, Any]) -> None:
    """The runner of an engine, asked about the work of real plans, gives the same kernels."""
    settings, config = Settings(model=str(folder), **changes), ModelConfig.load(folder)
    steps = AbsentEngine(settings, config, TARGETS[name]).steps()
    batch, runner = make_runner(settings, config, resolve_dtype(settings, config.dtype, META))
    told, asked = [], []
    for step in steps:
        work = work_of(batch, step.decodes, step.prompt_tokens)
        bucket = None if settings.enforce_eager else runner.buckets.fitting(work)
        kernels = runner.choose(work, bucket).kernels
        assert kernels is not None
        told.append((step.name, step.kernels.attention, step.kernels.products))
        asked.append((step.name, kernels.attention, kernels.products))

    assert told == asked
    assert len(told) == len(DECODES) + len(PROMPTS) + len(MIXED)


LAUNCHED = {
    "rotary_kv_write": "_rotary_kv_write", "decode": "_decode_kernel", "prefill": "_prefill_kernel",
    "hopper": "_attention_kernel", "gemv": "_vector_kernel", "skinny_gemm": "_tiles_kernel",
    "hopper_gemm": "_specialized_kernel", "hopper_words": "widening_",
    "moe_pairs": "_pair_down_kernel", "moe_grouped": "_grouped_kernel",
    "moe_specialized": "_experts_kernel", "moe_coded": "_coded_kernel",
    "latent_write": "_latent_write_kernel", "latent_decode": "_latent_decode_kernel",
    "latent_prefill": "_latent_prefill_kernel", "expanded": "_expanded_kernel", "dequantized": "_dequantize_",
    "rounded": "_round_tokens_kernel",
}  # fmt: skip
"""How the names of what is launched begin."""
PRODUCTS = {"gemv", "skinny_gemm", "hopper_gemm", "moe_pairs", "moe_grouped", "dequantized", "rounded"}
PRODUCTS |= {"moe_specialized", "moe_coded"}
ATTENDS = set(LAUNCHED) - PRODUCTS
LAST_LAYER = {"rotary_kv_write", "decode", "latent_write", "latent_decode"}
"""What prompts need besides in the last layer, where the last tokens attend as decodes."""


CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "sm_90": [
        ("llama8b", {}), ("small", {"attention_backend": "torch"}), ("fp8", {}), ("gemma", {}), ("moe", {}),
        ("starcoder", {}), ("chunks", {}), ("gptoss20b-mxfp4", {}), ("deepseek-v2-lite", {}),
    ],
    "sm_89": [("llama8b", {"enforce_eager": True})],
    "sm_80": [
        ("small", {"deterministic": True}), ("awq", {}), ("moe", {"deterministic": True}),
        ("gptoss20b", {"deterministic": True}), ("deepseek-v2-lite", {"deterministic": True}),
    ],
}  # fmt: skip
"""By target: models, and what their settings change."""


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_is_launched(name: str, tmp_path: Path) -> None:
    """Every step launches the kernels of its path and of its products, and none of another path's."""
    cases = []
    for model, changes in CASES[name]:
        folder = tmp_path / model
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        cases.append((str(folder), changes))
    script = Path(__file__).with_name("launched_kernels.py")
    done = run([str(script), name, json.dumps(cases)])
    assert done.returncode == 0, done.stderr[-3000:]

    lines = done.stdout.splitlines()
    assert len(lines) == len(cases)
    for case, line in zip(CASES[name], lines, strict=True):
        for step in json.loads(line):
            check_launched(step, case)


def check_launched(step: dict[str, Any], case: tuple[str, dict[str, Any]]) -> None:
    """A step of a case launches what it is said to."""
    told = (case, step)
    found = {key for key, start in LAUNCHED.items() if any(each.startswith(start) for each in step["launched"])}
    products = {choice["kernel"] for choice in step["products"].values()}
    if any("rounded to" in choice["why"] for choice in step["products"].values()):
        products.add("rounded")
    attention = set(step["attention"]["kernels"]) - {"cudnn"}
    assert found >= (products | attention) & set(LAUNCHED), told
    if step["prompt_tokens"]:
        attention |= LAST_LAYER
    assert found & ATTENDS <= attention, told
    assert found & {"dequantized", "rounded"} <= products, told


def test_a_cpu_is_explained_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """float32 is read where it lies, other formats take the references; nothing is captured."""
    for options, path in (((), "cpu"), (("--dtype", "bfloat16"), "reference")):
        found = explained(capsys, folder, "--device", "cpu", *options)
        assert found["target"] == "cpu"
        assert {step["attention"]["path"] for step in found["steps"]} == {path}
        assert {step["launch"] for step in found["steps"]} == {"eager"}
        kernels = {choice["kernel"] for step in found["steps"] for choice in step["products"].values()}
        assert kernels == {"torch"}
    assert explained(capsys, folder, "--target", "cpu")["target"] == "cpu"


def test_the_shipped_model_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("model the shipped one, target cpu, ")


def test_a_rank_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which part of the model that is, is said."""
    found = explained(capsys, folder, "--target", "cpu", "-tp", "2")
    assert found["rank"] == "0 of 2"
    assert found["steps"]
    assert main(["explain", str(folder), "--target", "cpu", "-tp", "2", "--rank", "1", "--actor-name", "x"]) == 0
    assert "rank 1 of 2" in capsys.readouterr().out


def test_a_rank_with_some_experts_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With the kernels of a mixture of its own that gets half of the pairs: one of two choices of each token."""
    fields = {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    folder = make_golden(tmp_path, "qwen3_moe", fields)
    options = ("--target", "sm_90", "-tp", "2", "--dtype", "bfloat16", "--enforce-eager", "--enable-expert-parallel")
    steps = [step for step in explained(capsys, folder, *options)["steps"] if not step["prompt_tokens"]]
    part = Shape(16, 1, ModelConfig.load(folder).hidden_size, 64)
    expected = {
        count: str(choose_experts(count, part, torch.bfloat16, parse_target("sm_90", None)).kernel) for count in DECODES
    }
    told = {step["decodes"]: step["products"]["experts"]["kernel"] for step in steps}
    assert told.items() <= expected.items()
    assert set(told.values()) == {"moe_pairs", "moe_grouped"}


@needs_triton
def test_experts_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the router and the shared expert, with the launch shapes of both of their products."""
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    found = explained(capsys, tmp_path, "--target", "sm_90")
    products = {step["step"]: step["products"] for step in found["steps"]}
    names = ["qkv", "o", "router", "experts", "lm_head", "shared_gate_up", "shared_down"]
    assert list(products["decode 1"]) == names
    kernels = [products[step]["experts"]["kernel"] for step in ("decode 1", "decode 8", "prefill 4096")]
    assert kernels == ["moe_pairs", "moe_grouped", "moe_specialized"]
    assert products["decode 1"]["experts"]["config"]["gate_up"]["rows"] > 0
    sizes = [products[step]["experts"]["config"]["tokens"] for step in ("decode 8", "prefill 512", "prefill 4096")]
    assert sizes == [16, 64, 128]
    experts = products["decode 8"]["experts"]
    assert experts["source"] == "cost model"
    assert experts["estimated_us"]["own"] > 0


@needs_triton
def test_the_answer_is_json_or_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both name each step, its path and why; steps beyond the limits are left out."""
    options = "--target", "sm_90", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"
    found = explained(capsys, folder, *options)
    assert (found["target"], found["multiprocessors"], found["dtype"]) == ("sm_90", 132, "bfloat16")
    names = [step["step"] for step in found["steps"]]
    assert names == ["decode 1", "decode 8", "decode 32", "decode 64", "prefill 512", "prefill 1024", "prefill 2048"]
    first = found["steps"][0]
    assert first["attention"]["path"] == "fused_decode"
    assert first["attention"]["kernels"] == list(PATHS[AttentionPath.FUSED_DECODE].kernels)
    assert list(first["products"]) == ["qkv", "o", "gate_up", "down", "lm_head"]

    assert main(["explain", str(folder), *options]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in names)
    for step in found["steps"]:
        assert f"{step['attention']['path']}: {step['attention']['why']}" in text
        for choice in step["products"].values():
            why = "cost model" if choice["source"] == "cost model" else choice["why"]
            assert f"{choice['kernel']}: {why}" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--target", "hopper"), "a form like sm_90"),
        (("--target", "sm_12"), "--multiprocessors"),
        (("--target", "sm_80", "--kv-cache-dtype", "fp8"), "--kv-cache-dtype int8"),
        (("--device", "cpu", "--deterministic"), "--deterministic"),
        (("--target", "cpu", "-tp", "64"), "cannot be divided by so many ranks"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], text: str
) -> None:
    """As ``serve`` would on such a GPU."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert main(["explain", str(tmp_path), *options]) == 2
    assert text in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "nowhere"), "--target", "sm_90"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_it_shows_where_choices_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shape that was measured, one that was not, a user's table, and what a rule leaves to the library."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["small"] | {"intermediate_size": 5120}))
    target = Target(90, 132)
    user = tmp_path / "shapes"
    merge_table(user_path(target, user), Product("gated", 10240, 1024), {64: None})
    heads = DecodeHeads(8, 2, 128, 2)
    replace_bucket(user_path(target, user, Tuned.ATTENTION), 32, heads, DecodeForm(apart=True))

    found = explained(capsys, tmp_path, "--target", "sm_90", "--launch-shapes-dir", str(user))
    sources = {
        (step["decodes"], name): (choice["source"], choice["kernel"])
        for step in found["steps"]
        if not step["prompt_tokens"]
        for name, choice in step["products"].items()
    }
    assert sources[8, "qkv"] == ("measured table", "skinny_gemm")
    assert sources[64, "gate_up"] == ("user table", "cublas")
    assert sources[128, "gate_up"][0] == "cost model"
    prompt = next(step for step in found["steps"] if step["prompt_tokens"] and not step["decodes"])
    assert prompt["products"]["qkv"]["source"] == "rule"
    (modelled,) = (step["products"]["gate_up"] for step in found["steps"] if step["step"] == "decode 128")
    assert modelled["estimated_us"]["own"] > 0

    named = {step["step"] for step in found["steps"] if "rows apart (user table)" in step["attention"]["why"]}
    assert named == {"decode 32"}

    assert main(["explain", str(tmp_path), "--target", "sm_90", "--launch-shapes-dir", str(user)]) == 0
    text = capsys.readouterr().out
    assert "user table: the library was fastest" in text
    assert "cost model, estimated µs" in text


def test_targets_have_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a bandwidth, by which GPUs with the same processor differ."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["small"]))
    found = explained(capsys, tmp_path, "--target", "L4")
    assert (found["target"], found["multiprocessors"]) == ("sm_89", 58)
    slow, fast = (
        explained(capsys, tmp_path, "--target", "sm_90", "--memory-gb-per-s", rate)["steps"][0]["products"]["o"]
        for rate in ("3352", "4917")
    )
    assert fast["estimated_us"]["library"] < slow["estimated_us"]["library"]
