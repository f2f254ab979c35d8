"""What loading holds in memory: the quantized model, a weight that is stored, and the next, which is read meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.loading.formats import modules, online, storing
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import build_model
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.settings import Settings
from tests.helpers.model_factory import make_model
from tests.helpers.quantized.checkpoints import tensors_of
from tests.helpers.quantized.layouts import CPU

pytestmark = pytest.mark.share(6)

LAYERS, HIDDEN, WIDTH = 6, 256, 1024
SMALL = 1 << 13
"""Numbers that are worked on at once: as few beside these weights as they are beside real ones."""


LIMITS = (
    (online, "NUMBERS_AT_ONCE"), (storing, "PACKED_AT_ONCE"), (modules, "DENSE_AT_ONCE"), (modules, "BYTES_AT_ONCE"),
)  # fmt: skip


class Storages(TorchDispatchMode):
    """Adds up the bytes of all tensors that operations made and that are still alive; ``peak`` is the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: known for key, known in self._alive.items() if not known[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, with layers that take most of it."""
    from safetensors.torch import save_file

    folder = make_model(
        tmp_path_factory.mktemp("memory") / "model", "llama3", seed=1, hidden_size=HIDDEN, intermediate_size=WIDTH,
        num_hidden_layers=LAYERS, vocab_size=64,
    )  # fmt: skip
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_the_quantized_model_and_two_weights(method: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a layer of 16 bits, and far from all of them."""
    for place, name in LIMITS:
        monkeypatch.setattr(place, name, SMALL)
    config = with_quantization(Settings(quantization=method), ModelConfig.load(folder))
    with Storages() as storages:
        model = build_model(config, CPU, torch.bfloat16, Ops.reference(), 32)
        built = storages.peak
        load_weights(model, folder, "auto", 0, lambda _: None)
    weight, layer = 2 * HIDDEN * WIDTH, 2 * config.spec.layer_weights() // LAYERS
    assert 0.9 * model.parameters.num_bytes() < built < 1.3 * model.parameters.num_bytes()
    assert weight < storages.peak - built < 3 * weight < layer
    assert storages.peak < model.parameters.num_bytes() + layer


def test_rows_at_once_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its own scale."""
    found = []
    for numbers in (SMALL, 1 << 22):
        monkeypatch.setattr(online, "NUMBERS_AT_ONCE", numbers)
        dense = []
        for method in ("fp8", "int8", "int4"):
            config = with_quantization(Settings(quantization=method), ModelConfig.load(folder))
            model = build_model(config, CPU, torch.float32, Ops.reference(), 32)
            load_weights(model, folder, "auto", 0, lambda _: None)
            dense.append(torch.cat([layout.dense().flatten() for layout in model.parameters.layouts]))
        found.append(torch.cat(dense))
    assert torch.equal(*found)
