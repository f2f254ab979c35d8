"""Loading the parts of ranks: put together again they are the whole, and each byte is read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.loading import weight_copy
from pagebus.actors.executor.loading.weight_copy import StoredTensor, bytes_to_read, copy_weights
from pagebus.actors.executor.loading.weights import load_weights, our_names, own_parts, read_headers
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.model.family import Family
from pagebus.actors.model.shards.cuts import Cut
from pagebus.actors.model.shards.local import local_config
from tests.helpers.model_factory import make_golden, make_model

pytestmark = pytest.mark.share(6)

CPU = torch.device("cpu")
GOLDEN = [(family, name) for family in FAMILIES for name in family.golden]


def part_of(folder: Path, rank: int, world: int) -> Model:
    local = local_config(ModelConfig.load(folder), rank, world)
    return build_model(local, CPU, torch.float32, Ops.reference(), max_model_len=32)


def loaded(folder: Path, rank: int, world: int, load_format: str = "auto") -> tuple[Model, list[float]]:
    model, shares = part_of(folder, rank, world), []
    load_weights(model, folder, load_format, 0, shares.append)
    return model, shares


def put_together(stored: StoredTensor, whole: torch.Tensor, parts: list[tuple[Cut | None, torch.Tensor]]) -> None:
    """Each part lies where its cut says, and together they leave nothing out."""
    seen = torch.zeros(whole.shape, dtype=torch.int32)
    for cut, part in parts:
        if cut is None:
            assert torch.equal(part, whole)
            seen += 1
        elif cut.is_zero:
            assert not part.any()
        else:
            index = torch.cat([torch.arange(each.start, each.stop) for each in cut.ranges])
            assert torch.equal(part, whole.index_select(cut.dim, index))
            seen.index_add_(cut.dim, index, torch.ones_like(part, dtype=torch.int32))
    assert bool(seen.all()), stored


def parts_of(folder: Path, world: int) -> dict[str, list[tuple[StoredTensor, torch.Tensor]]]:
    """What every rank reads of every tensor of the model."""
    found: dict[str, list[tuple[StoredTensor, torch.Tensor]]] = {}
    for rank in range(world):
        model = part_of(folder, rank, world)
        stored = own_parts(our_names(read_headers(sorted(folder.glob("*.safetensors"))), model.config.names), model)
        model.parameters.find(stored)
        views = {name: torch.full(view.shape, torch.nan) for name, view in model.parameters.views.items()}
        copy_weights([(stored[name], view) for name, view in views.items()], lambda _: None)
        for name, view in views.items():
            found.setdefault(name, []).append((stored[name], view))
    return found


@pytest.mark.parametrize(("family", "name"), GOLDEN, ids=[name for _, name in GOLDEN])
def test_parts_put_together_are_the_whole(family: Family, name: str, tmp_path: Path) -> None:
    folder = make_golden(tmp_path, family.model_type, family.golden[name])
    names = ModelConfig.load(folder).names
    whole = {str(names.ours(theirs)): tensor for theirs, tensor in load_file(folder / "model.safetensors").items()}
    for name, parts in parts_of(folder, 2).items():
        put_together(parts[0][0], whole[name], [(stored.cut, part) for stored, part in parts])


@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_than_heads_of_keys(world: int, tmp_path: Path) -> None:
    """Two heads of keys on four ranks, one on three."""
    folder = make_model(
        tmp_path, "llama3", seed=1, num_attention_heads=8, num_key_value_heads=2 if world == 4 else 1,
        attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    whole = load_file(folder / "model.safetensors")
    for name, parts in parts_of(folder, world).items():
        put_together(parts[0][0], whole[name], [(stored.cut, part) for stored, part in parts])


def test_no_byte_is_read_twice(tmp_path: Path) -> None:
    """Of what is cut by rows of files each rank reads its own; progress counts what is read, up to all of it."""
    folder = make_model(tmp_path, "llama3", seed=2, num_attention_heads=4, num_key_value_heads=2)
    models = [part_of(folder, rank, 2) for rank in range(2)]
    headers = read_headers([folder / "model.safetensors"])
    query, out = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"
    parts = [own_parts(headers, model) for model in models]
    assert sum(bytes_to_read(part[query]) for part in parts) == headers[query].num_bytes
    assert [bytes_to_read(part[out]) for part in parts] == [headers[out].num_bytes] * 2  # short runs: whole rows, once
    for rank in range(2):
        _, shares = loaded(folder, rank, 2)
        assert shares[-1] == 1.0
        assert shares == sorted(shares)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("run_bytes", [1, 1 << 16])
def test_cuts_of_any_dimension_in_small_pieces(
    dim: int, run_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that end in the middle of a row, of a run, and of a tensor; and a change of the number format."""
    monkeypatch.setattr(weight_copy, "PIECE_BYTES", 256)
    monkeypatch.setattr(weight_copy, "RUN_BYTES", run_bytes)
    values = torch.randn(7, 9, 11, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file({"x": values}, tmp_path / "x.safetensors")
    [stored] = read_headers([tmp_path / "x.safetensors"]).values()
    ranges, read = (range(1, 3), range(4, 7)), []
    cut = Cut(dim, values.shape[dim], ranges)
    wanted = StoredTensor(stored.file, stored.offset, stored.format, stored.shape, stored.num_bytes, cut)
    expected = values.float().index_select(dim, torch.tensor([1, 2, 4, 5, 6]))
    got = torch.full(expected.shape, torch.nan)
    copy_weights([(wanted, got)], read.append)
    assert torch.equal(got, expected)
    assert sum(read) == bytes_to_read(wanted)


def test_dummy_weights_of_ranks_agree(tmp_path: Path) -> None:
    """What all ranks have is the same on all of them, whatever their other parts are; what is added once is once."""
    folder = make_model(tmp_path, "llama2", seed=3, num_attention_heads=4, num_key_value_heads=2, mlp_bias=True)
    (first, _), (second, _), (again, _) = (loaded(folder, rank, 2, "dummy") for rank in (0, 1, 0))
    views = [each.parameters.views for each in (first, second, again)]
    norm, query, bias = (
        "model.norm.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.down_proj.bias",
    )
    assert torch.equal(views[0][norm], views[1][norm])
    assert not torch.equal(views[0][query], views[1][query])
    assert torch.equal(views[0][query], views[2][query])
    assert views[0][bias].any()
    assert not views[1][bias].any()


def test_a_wrong_shape_is_named_as_the_whole_should_be(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama2", seed=4, num_attention_heads=4, num_key_value_heads=2)
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :100].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj.weight .* has shape \[64, 100\], config.json says \[64, 112\]"):
        loaded(folder, 1, 2)
