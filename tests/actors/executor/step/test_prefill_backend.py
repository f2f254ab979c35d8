"""What an idle executor makes ready for long prompts, on tensors without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.executor.loading.dry_run import make_runner
from pagebus.actors.executor.step import prefill_backend
from pagebus.actors.executor.step.prefill_backend import PrefillBackend
from pagebus.actors.executor.step.runner import Runner
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings
from pagebus.kernels.attention.cudnn_prefill import Batch, LongRow, batches_of_every_shape, problems
from pagebus.kernels.common.target import Target, compile_for

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 50,
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
SETTINGS = Settings(max_model_len=16384, max_num_batched_tokens=4096, max_num_seqs=4, attention_backend="torch")
BATCHES = batches_of_every_shape(4096, 16384)
AMPERE, HOPPER = Target(80, 108), Target(90, 132)


def runner_of(folder: Path, settings: Settings, target: Target = AMPERE) -> Runner:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    compile_for(target)
    return make_runner(settings, ModelConfig.load(folder), torch.bfloat16)[1]


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_each_shape_is_attended_once(tmp_path: Path, cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries lie between keys and values, as those of a pass do; a float8 cache has its scales."""
    attended: list[Batch] = []

    def attend(q: torch.Tensor, k_cache: torch.Tensor, *rest: Any) -> None:
        rows, scales, (k, v) = rest[-3:]
        assert q.shape == (sum(row.num_queries for row in rows), 16, 128)
        assert k.shape == v.shape == (len(q), 8, 128)
        assert q.stride() == k.stride() == v.stride() == (32 * 128, 128, 1)
        assert k_cache.shape[1:] == (16, 8, 128)
        assert (scales is not None) == (cache_dtype == "fp8")
        attended.append(rows)

    monkeypatch.setattr(prefill_backend, "cudnn_attention", attend)
    settings = SETTINGS.replace(kv_cache_dtype=cache_dtype)
    prompts = PrefillBackend(runner_of(tmp_path, settings))
    while prompts:
        prompts.prepare_next()
    assert attended == BATCHES


def test_too_little_memory_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts as long as that may never come: the executor goes on."""

    def attend(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(prefill_backend, "cudnn_attention", attend)
    prompts = PrefillBackend(runner_of(tmp_path, SETTINGS))
    prompts.prepare_next()
    assert not prompts


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrefillBackend:
    """Whose ``prepare_next`` attends nothing."""
    monkeypatch.setattr(prefill_backend, "cudnn_attention", lambda *_: None)
    settings = SETTINGS.replace(attention_backend="auto")
    return PrefillBackend(runner_of(tmp_path, settings))


CHUNK = (LongRow(0, 0, 4096, 12288),)


def test_no_prompt_waits_for_more_than_it_gains(prompts: PrefillBackend) -> None:
    """A shape that is missing goes another way until plans would have paid; then they are made."""
    gain_s = prefill_backend.gain_s(CHUNK, 16, 128)
    prompts.spare(2.5 * gain_s / len(problems(CHUNK)))

    assert [prompts.parts(CHUNK, decodes=False) for _ in range(4)] == [(), (), CHUNK, CHUNK]


def test_decodes_wait_for_no_plan(prompts: PrefillBackend) -> None:
    """Beside them prompts go to the library once it is ready for their shape."""
    prompts.spare(prefill_backend.gain_s(CHUNK, 16, 128) / 10)
    assert prompts.parts(CHUNK, decodes=True) == ()
    assert prompts.parts(CHUNK, decodes=False) == CHUNK
    assert prompts.parts(CHUNK, decodes=True) == CHUNK


def test_what_was_missed_is_made_ready_first(prompts: PrefillBackend) -> None:
    """And then left to the library, even by prompts that could not have waited."""
    prompts.spare(1.0)
    assert prompts.parts(CHUNK, decodes=False) == ()
    prompts.prepare_next()

    assert prompts
    assert prompts.parts(CHUNK, decodes=False) == CHUNK


def test_while_nobody_waits_everything_is_planned(prompts: PrefillBackend) -> None:
    """Before the engine is ready. What the library would not speed up is none of it."""
    assert prompts.parts(CHUNK, decodes=False) == CHUNK
    prompts.spare(1.0)
    assert prompts.parts(CHUNK, decodes=False) == CHUNK
    assert prompts.parts((LongRow(0, 0, 64, 12288),), decodes=False) == ()
    assert prompts.parts((LongRow(0, 0, 2048, 12288),), decodes=False) == ()


def test_a_chunk_between_pieces_leaves_its_middle_to_the_library(prompts: PrefillBackend) -> None:
    """What is before and after pieces of 512 is for the own kernel."""
    assert prompts.parts((LongRow(0, 0, 4096, 8200),), decodes=False) == (LongRow(0, 504, 3584, 8192),)


def test_larger_pieces_stand_in_for_smaller_ones(prompts: PrefillBackend) -> None:
    """Their shapes are fewer, and made ready first: a chunk whose own is missing leaves less to the library."""
    between = (LongRow(0, 0, 4095, 8191),)
    prompts.parts((LongRow(0, 0, 2048, 6144),), decodes=False)
    prompts.spare(1.0)
    assert prompts.parts(between, decodes=False) == (LongRow(0, 0, 2048, 6144),)
    prompts.prepare_next()
    assert prompts.parts(between, decodes=False) == (LongRow(0, 0, 3584, 7680),)


def test_nothing_is_made_ready_that_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes for which the own kernel is faster, and all where the library has no say."""

    def prompts(**changes: Any) -> PrefillBackend:
        return PrefillBackend(runner_of(tmp_path, SETTINGS.replace(**changes)))

    assert 0 < len(prompts(attention_backend="auto")) < len(BATCHES)
    assert not prompts(attention_backend="triton")
    assert not prompts(deterministic=True)
    monkeypatch.setitem(CONFIG, "use_sliding_window", True)
    monkeypatch.setitem(CONFIG, "sliding_window", 4096)
    monkeypatch.setitem(CONFIG, "max_window_layers", 0)
    assert not prompts()


def test_our_kernel_takes_prefill_backend_where_there_is_one(tmp_path: Path) -> None:
    """It waits for no plans, so none are made, and decodes may be beside them."""
    for backend in ("auto", "triton"):
        settings = SETTINGS.replace(attention_backend=backend)
        prompts = PrefillBackend(runner_of(tmp_path, settings, HOPPER))
        assert not prompts
        assert prompts.parts(CHUNK, True) == (CHUNK[0]._replace(for_hopper=True),)
    assert not PrefillBackend(runner_of(tmp_path, SETTINGS, HOPPER)).parts(CHUNK, False)[0].for_hopper
