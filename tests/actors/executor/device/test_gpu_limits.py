"""What a kind of GPU cannot do is refused at start, by every command, with what to do instead."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pagebus.actors.executor.actor
import pagebus.actors.executor.device.gpu_limits
from pagebus.actors.commands.cli import main
from pagebus.actors.executor.actor import ExecutorActor
from pagebus.actors.executor.device.gpu_limits import MOST_RANKS, check_gpu
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings, SettingsError
from pagebus.kernels.common.target import Target
from pagebus.kernels.exchange.peers import SENDERS
from tests.helpers.model_factory import make_model


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 512."""
    return make_model(tmp_path_factory.mktemp("wide"), "qwen3", seed=1, head_dim=512, num_hidden_layers=1)


@pytest.mark.parametrize("capability", [80, 86])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_no_fp8_before_ada(name: str, capability: int) -> None:
    """The message names the cache that takes its place; that one is taken, and so is FP8 elsewhere."""
    target = Target(capability, 100)
    with pytest.raises(SettingsError, match=rf"--kv-cache-dtype {name}: this GPU \(sm_{capability}\).*dtype int8"):
        check_gpu(Settings(kv_cache_dtype=name), None, target)
    for settings in ({"kv_cache_dtype": "int8"}, {}, {"kv_cache_dtype": name, "device": "cpu"}):
        check_gpu(Settings(**settings), None, target)
    for other in (Target(89, 142), Target(90, 132), None):
        check_gpu(Settings(kv_cache_dtype=name), None, other)


@pytest.mark.parametrize("capability", [86, 89])
def test_no_heads_of_512_with_little_shared_memory(wide: Path, capability: int) -> None:
    """Other GPUs and the CPU have room, and so has a cache of one byte; heads of 256 fit everywhere."""
    config = dataclasses.replace(ModelConfig.load(wide), dtype="bfloat16")
    with pytest.raises(SettingsError, match=rf"heads of 512: this GPU \(sm_{capability}\).*dtype int8"):
        check_gpu(Settings(), config, Target(capability, 100))
    for settings in ({"device": "cpu"}, {"kv_cache_dtype": "int8"}, {"dtype": "float32"}):
        check_gpu(Settings(**settings), config, Target(capability, 100))
    check_gpu(Settings(), dataclasses.replace(config, head_dim=256), Target(capability, 100))
    check_gpu(Settings(), config, Target(80, 108))
    check_gpu(Settings(), config, None)


def test_no_more_ranks_of_a_stage_than_exchange() -> None:
    """Stages may be more; on CPUs there is no limit."""
    assert MOST_RANKS == SENDERS
    with pytest.raises(SettingsError, match=r"--tensor-parallel-size 9: at most 8 .* --pipeline-parallel-size"):
        check_gpu(Settings(tensor_parallel_size=SENDERS + 1), None, Target(90, 132))
    check_gpu(Settings(tensor_parallel_size=SENDERS, pipeline_parallel_size=2), None, Target(90, 132))
    check_gpu(Settings(tensor_parallel_size=SENDERS + 1), None, None)


def test_serve_ends_at_once(wide: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a line on standard error, and 2."""
    monkeypatch.setattr(pagebus.actors.executor.device.gpu_limits, "first_target", lambda: Target(86, 84))
    assert main(["serve", str(wide), "--kv-cache-dtype", "fp8"]) == 2
    assert "use --kv-cache-dtype int8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"), [({"kv_cache_dtype": "fp8"}, "kv-cache-dtype fp8"), ({"dtype": "half"}, "heads of 512")]
)
def test_an_executor_finds_it_before_it_loads(
    settings: dict[str, Any], message: str, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it looks at the model's files."""
    monkeypatch.setattr(pagebus.actors.executor.actor, "first_target", lambda: Target(86, 84))
    monkeypatch.setattr(pagebus.actors.executor.actor, "in_thread", lambda *_: None)
    actor = SimpleNamespace(settings=Settings(model=str(wide), **settings), _ready_triton=None)
    with pytest.raises(SettingsError, match=message):
        ExecutorActor._find_model(actor)  # type: ignore[arg-type]


def test_kernels_are_not_compiled_for_it(wide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that compiles ahead says so too."""
    for option, target, message in (
        ("--kv-cache-dtype=fp8", "sm_80", "dtype int8"),
        ("--dtype=bfloat16", "sm_89", "heads of 512"),
    ):
        assert main(["compile-kernels", str(wide), option, "--target", target]) == 2
        assert message in capsys.readouterr().err
