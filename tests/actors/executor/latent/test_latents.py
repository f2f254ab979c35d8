"""Engines of models with latent attention: their cache, preemption, swap, cached prefixes, padded steps, long
prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.memory.kv_cache import allocate_kv_cache, kv_block_bytes, layer_pages
from pagebus.actors.executor.models.build import build_model
from pagebus.actors.model.config import ModelConfig, parse_config, read_json
from pagebus.actors.model.families.latent.deepseek import DEEPSEEK2, DEEPSEEK3
from pagebus.actors.settings import SettingsError
from pagebus.kernels.latent.expanded_plan import Sizes, rows_to_expand
from tests.actors.executor.eager_graphs import use_eager_graphs
from tests.actors.executor.memory.test_swap import make_prompts
from tests.actors.executor.models.test_families import PagedSequences, load
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden, reference_generate

pytestmark = pytest.mark.share(6)

CPU = torch.device("cpu")
MAX_TOKENS = 12
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 96, "max_num_seqs": 6,
    "max_num_batched_tokens": 64, "num_gpu_blocks_override": 12,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden(tmp_path_factory.mktemp("model"), DEEPSEEK3.model_type, DEEPSEEK3.golden["deepseek-v3"])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return reference_generate(folder, prompts, MAX_TOKENS)


def test_the_cache_has_one_tensor_of_a_layer(folder: Path) -> None:
    """Values are views of keys, and a block has the bytes that the spec says."""
    config = ModelConfig.load(folder)
    cache = allocate_kv_cache(config, 5, 16, torch.bfloat16, CPU)
    entries = config.latent.kv_rank + config.latent.rope_dim
    assert tuple(cache.shape) == (5, config.num_layers, 1, 16, 1, entries)
    assert cache.nbytes == 5 * kv_block_bytes(config, 16, torch.bfloat16)
    assert kv_block_bytes(config, 16, torch.bfloat16) == 16 * config.num_layers * entries * 2
    keys, values, scales = layer_pages(cache, 1, config)
    keys[2, 3, 0, 4] = 7.0
    assert values[2, 3, 0, 4] == 7.0
    assert values.shape[-1] == config.latent.kv_rank
    assert scales is None


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8, torch.bfloat16])
def test_a_cache_of_another_format_is_refused(folder: Path, cache_dtype: torch.dtype) -> None:
    """By name, with what to do instead."""
    name = str(cache_dtype).removeprefix("torch.")
    with pytest.raises(SettingsError, match=f"--kv-cache-dtype {name}.*--kv-cache-dtype auto"):
        build_model(ModelConfig.load(folder), CPU, torch.float32, Ops.reference(), 64, cache_dtype)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_and_swapped_sequences_give_the_same_tokens(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], mode: str, caching: bool
) -> None:
    """Ten sequences over twelve blocks: each token is transformers'."""
    driver = Driver(folder, **SETTINGS)
    core = CoreDriver(driver, depth=2, preemption_mode=mode, enable_prefix_caching=caching)
    answers = [core.send(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)]
    core.run()
    driver.close()

    assert [answer.tokens for answer in answers] == expected
    assert any(each.swapped == (mode == "swap") for each in core.preempted)
    assert mode == "swap" or not any(each.swapped for each in core.preempted)
    assert not any(core.core.leftovers().values())


@pytest.mark.parametrize("budget", [3, 40])
def test_padded_steps(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA graphs have them: rows and tokens that only fill up change nothing."""
    driver = Driver(folder, **SETTINGS | {"num_gpu_blocks_override": 60})
    graphs = use_eager_graphs(driver, monkeypatch, Buckets(6, 40, 4, decodes_apart=True))
    scheduler = driver.scheduler(budget)
    sequences = [scheduler.add(prompt, MAX_TOKENS) for prompt in prompts]
    driver.drive(scheduler)
    driver.close()
    assert [sequence.output for sequence in sequences] == expected
    assert graphs.replayed


def test_long_prompts_are_expanded(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are long enough, beside others that are not and beside decodes, behind a past and in pieces."""
    driver = Driver(folder, **SETTINGS | {"num_gpu_blocks_override": 60})
    runner, told = driver.engine._loaded.runner, []
    mixer = runner.model.config.latent
    sizes = Sizes(mixer.heads, mixer.nope_dim, mixer.rope_dim, mixer.v_head_dim, mixer.kv_rank, 4)
    monkeypatch.setitem(rows_to_expand.__globals__, "LEAST_QUERIES", 8)

    def select(rows: Any, decodes: bool) -> Any:
        told.append((rows_to_expand(rows, sizes), rows, decodes))
        return told[-1][0]

    monkeypatch.setattr(runner, "select_long_rows", select)
    scheduler = driver.scheduler(40)
    sequences = [scheduler.add(prompt, MAX_TOKENS) for prompt in prompts]
    driver.drive(scheduler)
    driver.close()
    assert [sequence.output for sequence in sequences] == expected
    assert any(long and decodes and len(long) == len(rows) for long, rows, decodes in told)
    assert any(long and len(long) < len(rows) for long, rows, _ in told)
    assert any(row.past for long, _, _ in told for row in long)


def test_layers_that_guess_further_tokens_are_not_read(folder: Path, tmp_path: Path) -> None:
    """A checkpoint has them behind the others."""
    raw = read_json(folder / "config.json") | {"num_nextn_predict_layers": 1}
    tensors = load_file(folder / "model.safetensors")
    count = raw["num_hidden_layers"]
    first = {name: each for name, each in tensors.items() if name.startswith("model.layers.0.")}
    extra = {name.replace("layers.0.", f"layers.{count}."): each.clone() for name, each in first.items()}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert parse_config(raw, {}).num_layers == count

    got, expected = (PagedSequences(load(each, 64), 1).forward([[5, 7, 9]])[0] for each in (tmp_path, folder))
    assert torch.equal(got, expected)


def test_dummy_weights_run(tmp_path: Path) -> None:
    """What is measured without a checkpoint."""
    made = make_golden(tmp_path, DEEPSEEK2.model_type, DEEPSEEK2.golden["deepseek-v2-lite"])
    driver = Driver(made, **SETTINGS | {"load_format": "dummy"})
    scheduler = driver.scheduler()
    sequence = scheduler.add([1, 2, 3], 4)
    driver.drive(scheduler)
    driver.close()
    assert len(sequence.output) == 4
