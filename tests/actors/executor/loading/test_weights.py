"""Loading weights: sharded, converted, refused by name, and dummy ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.loading.weight_copy import copy_weights
from pagebus.actors.executor.loading.weights import load_weights, read_headers
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.model.config import ModelConfig, ModelError
from tests.helpers.model_factory import make_model

CPU = torch.device("cpu")
QUERY = "model.layers.1.self_attn.q_proj.weight"


def build(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return build_model(ModelConfig.load(folder), CPU, dtype, Ops.reference(), max_model_len=32)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    model = build(folder, dtype)
    load_weights(model, folder, "auto", 0, lambda _: None)
    return model


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite the one weight file of ``folder``."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "qwen2", seed=1)


def test_fills_every_tensor_in_its_place(folder: Path) -> None:
    """Each checkpoint tensor lies in its part of the fused one."""
    model, stored = load(folder), load_file(folder / "model.safetensors")

    assert set(model.parameters.views) == set(stored)
    for name, view in model.parameters.views.items():
        assert torch.equal(view, stored[name]), name
    attention = "model.layers.0.self_attn"
    fused = torch.cat([stored[f"{attention}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(model.layers[0].attention.qkv.weight, fused)


def test_shards_equal_one_file(folder: Path, tmp_path: Path) -> None:
    """A model in many files loads as the same model in one."""
    sharded = make_model(tmp_path / "sharded", "qwen2", seed=1, max_shard_size="100KB")

    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = load(folder).parameters.views, load(sharded).parameters.views
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_progress_rises_to_one(tmp_path: Path) -> None:
    """Progress is reported by bytes, never falls and ends at 1."""
    folder = make_model(tmp_path, "llama2", seed=1, max_shard_size="100KB")
    seen: list[float] = []

    load_weights(build(folder), folder, "safetensors", 0, seen.append)

    assert seen == sorted(seen)
    assert 0 < seen[0] < 0.5
    assert seen[-1] == 1.0


def test_converts_to_the_wanted_dtype(folder: Path) -> None:
    """Files of one format fill a model of another."""
    stored = load_file(folder / "model.safetensors")[QUERY]

    assert torch.equal(load(folder, torch.bfloat16).parameters.views[QUERY], stored.bfloat16())
    change(folder, lambda tensors: tensors.update({name: t.half() for name, t in tensors.items()}))
    assert torch.equal(load(folder).parameters.views[QUERY], stored.half().float())


def test_names_a_missing_tensor(folder: Path) -> None:
    """A checkpoint that lacks a tensor is refused by its name."""
    change(folder, lambda tensors: tensors.pop(QUERY))

    with pytest.raises(ModelError, match=rf"lack tensor {QUERY}, which"):
        load(folder)


def test_names_some_of_many_missing_tensors(folder: Path) -> None:
    """Three names and a count are enough."""
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])

    with pytest.raises(ModelError, match=r"model\.layers\.1\.\S+, \S+, \S+ and 9 more"):
        load(folder)


def test_names_a_wrong_shape(folder: Path) -> None:
    """A wrong shape is refused with both shapes."""
    change(folder, lambda tensors: tensors.update({QUERY: torch.zeros(3, 64)}))

    with pytest.raises(ModelError, match=rf"{QUERY} in model.safetensors has shape \[3, 64\], .* says \[256, 64\]"):
        load(folder)


@pytest.mark.parametrize(("dtype", "said"), [(torch.float64, "F64"), (torch.int8, "I8")])
def test_names_an_unexpected_format(folder: Path, dtype: torch.dtype, said: str) -> None:
    """Formats that would need a rule of their own are refused."""
    change(folder, lambda tensors: tensors.update({QUERY: tensors[QUERY].to(dtype)}))

    with pytest.raises(ModelError, match=f"{QUERY} .* has format {said}"):
        load(folder)


def test_names_a_tensor_that_nothing_asks_for(folder: Path) -> None:
    """Weights that the model would not use mean that it is another model; old rotary tables are harmless."""
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(folder)
    change(folder, lambda tensors: tensors.update({"model.layers.0.mlp.gate_proj.bias": torch.ones(112)}))

    with pytest.raises(ModelError, match=r"hold tensor model\.layers\.0\.mlp\.gate_proj\.bias"):
        load(folder)


def test_a_tied_head_needs_no_tensor_and_ignores_one(tmp_path: Path) -> None:
    """With tied embeddings the head is the embedding, whether or not the file repeats it."""
    folder = make_model(tmp_path, "llama3", seed=1, tie_word_embeddings=True)
    model = load(folder)

    assert "lm_head.weight" not in model.parameters.views
    assert model.head.weight is model.embedding.weight
    change(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(307, 64)}))
    assert load(folder).head.weight.any()


def test_names_a_missing_shard(tmp_path: Path) -> None:
    """An index whose files are not all there is refused by the first one's name."""
    folder = make_model(tmp_path, "llama2", seed=1, max_shard_size="100KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()

    with pytest.raises(ModelError, match=rf"weight file {gone.name} is missing"):
        load(folder)


def test_an_index_may_not_leave_the_folder(folder: Path) -> None:
    """File names in an index are names, not paths."""
    index = {"weight_map": {QUERY: "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelError, match="outside the model's folder"):
        load(folder)


def test_a_cut_off_file_is_refused(folder: Path) -> None:
    """A file that lost its end, or is no safetensors file at all, is refused by name before anything is copied."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-10], whole[:50], whole[:5], b"", b"\xff" * 64):
        file.write_bytes(content)

        with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
            load(folder)


def test_a_tensor_without_its_bytes_is_refused(folder: Path) -> None:
    """What lies behind it in the file is not read in their place."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[QUERY]["data_offsets"][1] -= 4
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    with pytest.raises(ModelError, match=rf"{QUERY} in model.safetensors has 65532 bytes, its shape 65536"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    """Files that could run code are not read."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(ModelError, match="is a pickle"):
        load(folder)


def test_dummy_weights_need_no_file_and_repeat(folder: Path) -> None:
    """Dummy weights are random, the same for a seed, and all of the range that vLLM gives them."""
    (folder / "model.safetensors").unlink()
    models = [build(folder) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        load_weights(model, folder, "dummy", seed, lambda _: None)
    first, same, other = (model.parameters.views for model in models)

    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first[QUERY], other[QUERY])
    for view in first.values():
        assert 0.8e-3 < view.abs().max() <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_any_length_give_the_same_weights(
    folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are cut where buffers end, also in the middle of a row, and converted piece by piece."""
    whole = load(folder, dtype)

    monkeypatch.setattr("pagebus.actors.executor.loading.weight_copy.PIECE_BYTES", 52)
    pieces = load(folder, dtype)

    for name, view in whole.parameters.views.items():
        assert torch.equal(view, pieces.parameters.views[name]), name


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00002.pt"])
def test_pickles_are_refused_by_name(name: str, folder: Path) -> None:
    """They could run code."""
    model = build(folder)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=rf"{name} is a pickle, which could run code, and is never read"):
        load_weights(model, folder, "auto", 0, lambda _: None)


def test_a_file_that_became_shorter_is_noticed(folder: Path) -> None:
    """Whatever the header promised when it was read."""
    model = build(folder)
    file = folder / "model.safetensors"
    stored = read_headers([file])
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)

    with pytest.raises(OSError, match="shorter"):
        copy_weights([(stored[name], view) for name, view in model.parameters.views.items()], lambda _: None)
