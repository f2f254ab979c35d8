"""Settings of adapters: what names them, and what they do not go with yet."""

from __future__ import annotations

import pytest

from pagebus.actors.settings import Settings, SettingsError
from pagebus.actors.settings.combinations.lora import named_adapters


def test_modules_are_pairs_or_objects() -> None:
    assert named_adapters(("a=/x=y", '{"name": "b", "path": "/z", "base_model_name": "m"}')) == {"a": "/x=y", "b": "/z"}


@pytest.mark.parametrize(
    "modules", [("a",), ("=x",), ("a=",), ("a=1", "a=2"), ("{",), ('{"name": 1, "path": "x"}',), ('{"nam": "a"}',)]
)
def test_modules_that_are_neither(modules: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="--lora-modules"):
        Settings(enable_lora=True, lora_modules=modules)


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2}, {"max_loras": 4, "max_cpu_loras": 3},
        {"enable_lora": False, "lora_target_modules": ("q_proj",)}, {"lora_target_modules": ("gate",)},
        {"enable_lora": False, "lora_modules": ("a=b",)}, {"enable_lora": False, "lora_resolver_cache_dir": "/x"},
    ],
)  # fmt: skip
def test_what_does_not_go_together(options: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="lora"):
        Settings(**{"enable_lora": True, **options})  # type: ignore[arg-type]


def test_ranks_take_adapters() -> None:
    assert Settings(enable_lora=True, tensor_parallel_size=4).num_ranks == 4
