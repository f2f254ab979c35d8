"""Kernels compiled ahead: a rehearsal foresees everything that an engine launches, and the cache is found again."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.bench.driver.shapes import SHAPES
from pagebus.actors.executor.loading import kernel_cache
from pagebus.actors.executor.loading.compile_command import parse_target
from pagebus.actors.executor.loading.kernel_cache import KernelBuild
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings, SettingsError
from pagebus.kernels.common.target import Target
from tests.kernels import warm

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 5000,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 352,
    "shared_expert_intermediate_size": 704, "decoder_sparse_step": 2, "num_hidden_layers": 4,
}  # fmt: skip
RANK_OF_EXPERTS = {"tensor_parallel_size": 4, "rank": 3, "actor_name": "x", "enable_expert_parallel": True}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 960,
    "intermediate_size": 960,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "sliding_window": 128,
}
H200 = Target(90, 132)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(arguments: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Python without Triton's interpreter, with an own cache of compiled kernels."""
    return warm.run(arguments, TRITON_CACHE_DIR=str(cache))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enforce_eager": True, "max_model_len": 16384, "max_num_batched_tokens": 2048},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
    ],
)
def test_a_rehearsal_foresees_every_kernel_of_a_random_workload(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Steps of any mixture, with every kind of sampling, launch nothing that was not launched while rehearsing; and
    what is compiled once is found by whoever compiles it again."""
    settings = json.dumps({"max_model_len": 4096, **changes})

    done = run([str(Path(__file__).with_name("record_kernels.py")), str(folder), settings], tmp_path / "cache")

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    wanted = {"_decode_kernel", "_prefill_kernel", "_limits_kernel", "_logprobs_kernel", "_sum_parts_kernel"}
    assert wanted <= set(found["recorded"])
    assert found["unforeseen"] == []
    assert found["hits"] == [False, True]


@pytest.mark.parametrize(
    ("fields", "ranks"), [(MOE, {}), (GPT_OSS, {}), (MOE, RANK_OF_EXPERTS)], ids=["shared", "biased", "some of them"]
)
def test_experts_are_foreseen_too(folder: Path, tmp_path: Path, fields: dict[str, Any], ranks: dict[str, Any]) -> None:
    """Their kernels depend on numbers of tokens that no dense product knows; also of a rank that has some of them."""
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    settings = json.dumps({"max_model_len": 4096, "enforce_eager": True, **ranks})

    done = run([str(Path(__file__).with_name("record_kernels.py")), str(folder), settings], tmp_path / "cache")

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {"_pair_down_kernel", "_grouped_kernel"} <= set(found["recorded"])
    assert ("_add_shared_kernel" in found["recorded"]) == (fields is MOE)
    assert found["unforeseen"] == []


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2, "rank": 1}], ids=["one rank", "a rank of two"])
def test_adapters_are_foreseen_too(folder: Path, tmp_path: Path, ranks: dict[str, Any]) -> None:
    """What steps launch in which some token has an adapter, beside those in which none has."""
    settings = json.dumps({"max_model_len": 4096, "enable_lora": True, "max_loras": 4, **ranks})

    done = run([str(Path(__file__).with_name("record_kernels.py")), str(folder), settings], tmp_path / "cache")

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {"_shrink_kernel", "_shrink_prompts_kernel", "_expand_kernel"} <= set(found["recorded"])
    assert found["unforeseen"] == []


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2, "rank": 1}], ids=["one rank", "a rank of two"])
def test_draft_models_are_foreseen_too(folder: Path, tmp_path: Path, ranks: dict[str, Any]) -> None:
    """Other heads and widths than those of the model, in the same steps; of a rank its part of them."""
    small = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "head_dim": 64}
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(CONFIG | small))
    drafting = {"spec_method": "draft_model", "spec_model": str(draft), "spec_tokens": 4, "load_format": "dummy"}
    settings = json.dumps({"max_model_len": 4096, "enforce_eager": True, **drafting, **ranks})

    done = run([str(Path(__file__).with_name("record_kernels.py")), str(folder), settings], tmp_path / "cache")

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert ("_part_guesses_kernel" in found["recorded"]) == bool(ranks)
    assert found["unforeseen"] == []


def test_latents_are_foreseen_too(folder: Path, tmp_path: Path) -> None:
    """Decodes, short prompts, and long ones that are expanded, in one piece and in several."""
    raw = SHAPES["deepseek-v2-lite"] | {"num_hidden_layers": 3, "n_routed_experts": 8, "vocab_size": 1000}
    (folder / "config.json").write_text(json.dumps(raw))
    settings = json.dumps({"max_model_len": 4096, "max_num_batched_tokens": 2048})

    done = run([str(Path(__file__).with_name("record_kernels.py")), str(folder), settings], tmp_path / "cache")

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    wanted = {"_latent_decode_kernel", "_latent_prefill_kernel", "_latent_write_kernel", "_head_product_kernel"}
    assert wanted | {"_expanded_kernel", "_gather_latents_kernel"} <= set(found["recorded"])
    assert found["unforeseen"] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_stages_are_foreseen_too(folder: Path, tmp_path: Path, rank: int) -> None:
    """Only the last one samples, which is rank 0; the first stores its tokens."""
    settings = json.dumps({"max_model_len": 4096, "pipeline_parallel_size": 2, "rank": rank})

    done = run([str(Path(__file__).with_name("record_kernels.py")), str(folder), settings], tmp_path / "cache")

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {"_decode_kernel", "_prefill_kernel", "_store_sampled_kernel"} <= set(found["recorded"])
    assert ("_limits_kernel" in found["recorded"]) == (rank == 0)
    assert found["unforeseen"] == []


def test_the_mark_names_what_decides_about_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other limits, another model or another GPU need other kernels; another port does not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    config = ModelConfig.load(folder)

    def mark(target: Target = H200, **settings: Any) -> Path:
        return kernel_cache.mark_path(Settings(model=str(folder), **settings), config, target)

    marks = {mark(), mark(max_num_seqs=8), mark(dtype="float16"), mark(Target(80, 108)), mark(kv_cache_dtype="fp8")}
    marks |= {mark(pipeline_parallel_size=2), mark(pipeline_parallel_size=2, rank=1)}
    marks |= {mark(tensor_parallel_size=2), mark(tensor_parallel_size=2, enable_expert_parallel=True)}

    assert len(marks) == 9
    assert mark(port=1) == mark()
    assert {path.parent for path in marks} == {folder / "cache"}


def test_a_complete_cache_needs_no_build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is started if there is no mark, and none if there is; none after the stop."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    built: list[Target] = []

    def start(build: KernelBuild, target: Target) -> subprocess.Popen[bytes]:
        built.append(target)
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(KernelBuild, "_start", start)
    settings, config = Settings(model=str(folder)), ModelConfig.load(folder)
    build = KernelBuild(settings)

    assert not build.run(config, H200)  # the process failed
    kernel_cache.mark_path(settings, config, H200).touch()
    assert build.run(config, H200)
    kernel_cache.mark_path(settings, config, H200).unlink()
    build.stop()
    assert not build.run(config, H200)

    assert built == [H200]


def test_one_compiles_after_another(tmp_path: Path) -> None:
    """Ranks of a host: who begins later waits, and finds what the first has compiled."""
    from pagebus.actors.executor.loading.compilation import Turn

    first, second = (Turn(tmp_path / "cache" / "pagebus-model.lock") for _ in range(2))
    assert first.take(wait=False)
    assert not second.take(wait=False)
    first.end()
    assert second.take(wait=True)
    second.end()


@pytest.mark.parametrize("complete", [True, False])
def test_an_old_cache_hides_no_kernels(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    """What an image ships is used if that is all it needs, whatever a volume over the cache holds; else the cache."""
    (shipped := tmp_path / "shipped").mkdir()
    (cache := tmp_path / "cache").mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(KernelBuild, "_start", lambda *_: subprocess.Popen(["true"]))
    settings, config = Settings(model=str(folder), kernels_dir=str(shipped)), ModelConfig.load(folder)
    (cache / "pagebus-of-an-older-image").touch()
    if complete:
        (shipped / kernel_cache.mark_path(settings, config, H200).name).touch()

    assert KernelBuild(settings).run(config, H200)
    assert kernel_cache.cache_dir() == (shipped if complete else cache)


def test_the_command_says_what_it_needs(folder: Path, tmp_path: Path) -> None:
    """Without a GPU a target has to be named; a model that cannot be read is refused like by serve."""
    command = ["-m", "pagebus.actors.commands.cli", "compile-kernels"]

    no_target = run([*command, str(folder)], tmp_path) if not os.path.exists("/dev/nvidiactl") else None
    no_model = run([*command, str(tmp_path / "nowhere"), "--target", "sm_90"], tmp_path)

    if no_target is not None:
        assert (no_target.returncode, "--target" in no_target.stderr) == (2, True)
    assert (no_model.returncode, "nowhere" in no_model.stderr) == (2, True)


@pytest.mark.parametrize("name", ["90", "sm_90"])
def test_targets_have_their_usual_names(name: str) -> None:
    assert parse_target(name, None) == H200
    assert parse_target(name, 114) == Target(90, 114)


@pytest.mark.parametrize("name", ["hopper", "sm_", "sm_12"])
def test_unknown_targets_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        parse_target(name, None)
