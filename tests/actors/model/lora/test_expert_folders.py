"""Folders with adapters of experts: what is read of each form, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagebus.actors.executor.adapters.experts import HostExperts
from pagebus.actors.executor.adapters.reading import reader
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import digest_of, open_adapter
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.bus.messages import AdapterSource
from tests.helpers.model_factory import make_golden

EXPERTS, HIDDEN, WIDTH = 6, 64, 40
ALL = "experts", "q_proj"
PREFIX = "base_model.model.model.layers.1.mlp.experts"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "norm_topk_prob": True}
    return make_golden(tmp_path_factory.mktemp("model"), "qwen3_moe", sizes)


def save(folder: Path, tensors: Tensors, **fields: Any) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "peft_version": "0.21.2", **fields}
    (folder / CONFIG).write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / WEIGHTS)
    return folder


def stacked(rank: int = 2) -> Tensors:
    """Both products of all experts, as PEFT saves them."""
    shapes = {
        "base_layer.lora_A": (EXPERTS * rank, HIDDEN), "base_layer.lora_B": (2 * WIDTH, rank * EXPERTS),
        "lora_A": (EXPERTS * rank, WIDTH), "lora_B": (HIDDEN, rank * EXPERTS),
    }  # fmt: skip
    return {f"{PREFIX}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def one(number: int, part: str, rank: int = 2) -> Tensors:
    inputs, outputs = (WIDTH, HIDDEN) if part == "down_proj" else (HIDDEN, WIDTH)
    shapes = {"A": (rank, inputs), "B": (outputs, rank)}
    return {f"{PREFIX}.{number}.{part}.lora_{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def read(folder: Path, base: Path) -> dict[str, HostExperts]:
    config = ModelConfig.load(base)
    source = AdapterSource(name="x", path=str(folder), digest=digest_of(open_adapter(folder, config, 16, ALL)))
    found = reader(config, 16, torch.float32, ALL)(source).parts(config)
    assert all(isinstance(each, HostExperts) for each in found.values())
    return {name.rpartition(".")[2]: each for name, each in found.items() if isinstance(each, HostExperts)}


def test_all_in_one(base: Path, tmp_path: Path) -> None:
    """A has expert after expert, B all experts' columns of one rank after those of another."""
    tensors = stacked()
    found = read(save(tmp_path / "adapter", tensors), base)
    assert found.keys() == {"gate_up_proj", "down_proj"}
    for name, part in (("gate_up_proj", "base_layer."), ("down_proj", "")):
        a, b = (tensors[f"{PREFIX}.{part}lora_{matrix}.weight"] for matrix in "AB")
        assert torch.equal(found[name].a, a.view(EXPERTS, 2, -1))
        assert torch.equal(found[name].b[3], b[:, [3, EXPERTS + 3]])
        assert found[name].scales.tolist() == [2.0] * EXPERTS


def test_one_product_alone_is_known_by_its_sizes(base: Path, tmp_path: Path) -> None:
    down = {name: each for name, each in stacked().items() if "base_layer" not in name}
    both = {name.replace(".base_layer", ""): each for name, each in stacked().items() if "base_layer" in name}
    assert read(save(tmp_path / "down", down), base).keys() == {"down_proj"}
    assert read(save(tmp_path / "both", both), base).keys() == {"gate_up_proj"}


def test_files_of_older_versions(base: Path, tmp_path: Path) -> None:
    """They took outputs for inputs: what is added is the same."""
    tensors = stacked()
    new = read(save(tmp_path / "new", tensors), base)["down_proj"]
    a, b = (tensors[f"{PREFIX}.lora_{matrix}.weight"] for matrix in "AB")
    turned = {
        f"{PREFIX}.lora_A.weight": b.view(HIDDEN, 2, EXPERTS).permute(2, 1, 0).reshape(-1, HIDDEN),
        f"{PREFIX}.lora_B.weight": a.view(EXPERTS, 2, WIDTH).permute(2, 1, 0).reshape(WIDTH, -1),
    }
    old = read(save(tmp_path / "old", turned, peft_version="0.18.0"), base)["down_proj"]
    assert torch.equal(old.a, new.a)
    assert torch.equal(old.b, new.b)


@pytest.mark.parametrize(
    ("version", "turned"), [("0.18.1", True), ("0.19.0", True), ("0.19.1", False), ("1.0.0", False)]
)
def test_of_square_products_the_version_decides(version: str, turned: bool, tmp_path: Path) -> None:
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
    base, told = make_golden(tmp_path / "base", "qwen3_moe", sizes), {"target_parameters": ["down_proj"]}
    a, b = torch.randn(EXPERTS * 2, HIDDEN), torch.randn(HIDDEN, 2 * EXPERTS)
    tensors = {f"{PREFIX}.lora_A.weight": a, f"{PREFIX}.lora_B.weight": b}
    found = read(save(tmp_path / "adapter", tensors, peft_version=version, **told), base)["down_proj"]
    assert torch.equal(found.b.transpose(1, 2) if turned else found.a, a.view(EXPERTS, 2, -1))
    with pytest.raises(AdapterError, match="cannot be told apart without peft_version"):
        read(save(tmp_path / "unknown", tensors, peft_version=None, **told), base)


def test_one_by_one(base: Path, tmp_path: Path) -> None:
    """Some experts, of different ranks: the others have zeros."""
    tensors = one(2, "gate_proj", 3) | one(2, "up_proj") | one(5, "up_proj")
    fields = {"rank_pattern": {r"experts\.2\.gate_proj": 3}, "alpha_pattern": {r"experts\.5\.up_proj": 10}}
    found = read(save(tmp_path / "adapter", tensors, **fields), base)
    assert found.keys() == {"gate_proj", "up_proj"}
    assert torch.equal(found["gate_proj"].a[2], tensors[f"{PREFIX}.2.gate_proj.lora_A.weight"])
    assert torch.equal(found["up_proj"].b[5], tensors[f"{PREFIX}.5.up_proj.lora_B.weight"])
    assert found["up_proj"].scales.tolist() == [0, 0, 2.0, 0, 0, 5.0]
    assert not found["up_proj"].a[[0, 1, 3, 4]].any()


def changed(change: Callable[[Tensors], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file({name: each.clone() for name, each in found.items()}, folder / WEIGHTS)

    return apply


A, B = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"
REFUSED: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("fewer experts", lambda t: t.update({A: t[A][:-2], B: t[B][:, :-2]}), "shape [10, 40], rank and model ask for"),
    ("more experts", lambda t: t.update({A: torch.ones(14, WIDTH), B: torch.ones(HIDDEN, 14)}), "shape [14, 40]"),
    ("another rank", lambda t: t.update({A: torch.ones(18, WIDTH), B: torch.ones(HIDDEN, 18)}), "shape [18, 40]"),
    ("another width", lambda t: t.update({A: torch.ones(12, WIDTH + 1)}), "no product of the model's 6 experts"),
    ("three dimensions", lambda t: t.update({A: torch.ones(EXPERTS, 2, WIDTH)}), "two sizes are wanted"),
    ("NaN", lambda t: t.update({A: torch.full((12, WIDTH), torch.nan)}), "NaN or infinity"),
    ("A alone", lambda t: t.pop(B), "lora_A alone"),
    ("twice the same product", lambda t: t.update({name.replace("base_layer.", ""): t[name] for name in list(t)
                                                   if "base_layer" in name}), "two of them"),
    ("in both forms", lambda t: t.update(one(3, "up_proj")), "two of them"),
    ("an expert too many", lambda t: t.update(one(EXPERTS, "up_proj")), "no such projection"),
    ("an expert below zero", lambda t: t.update(one(-1, "up_proj")), "no such projection"),
    ("a product that experts have not", lambda t: t.update({f"{PREFIX}.0.gate.lora_A.weight": t[A]}), "no such"),
    ("experts without numbers", lambda t: t.update({f"{PREFIX}.up_proj.lora_A.weight": t[A]}), "no such projection"),
    ("the router", lambda t: t.update({A.replace("experts", "gate"): torch.ones(2, HIDDEN)}), "no such projection"),
    ("no room", lambda t: t.update({A.replace("mlp.experts", "self_attn.o_proj"): t[A]}), "--lora-target-modules"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), [pytest.param(c, s, id=name) for name, c, s in REFUSED])
def test_refused(base: Path, tmp_path: Path, change: Callable[[Tensors], object], says: str) -> None:
    good = save(tmp_path / "good", stacked())
    folder = shutil.copytree(good, tmp_path / "bad")
    changed(change)(folder)
    with pytest.raises(AdapterError) as refused:
        digest_of(open_adapter(folder, ModelConfig.load(base), 16, ALL))
    assert says in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_limits(base: Path, tmp_path: Path) -> None:
    config, folder = ModelConfig.load(base), save(tmp_path / "good", stacked())
    with pytest.raises(AdapterError, match="rank 2, this server takes up to 1"):
        open_adapter(folder, config, 1, ALL)
    with pytest.raises(AdapterError, match="no room for experts: name it in --lora-target-modules"):
        open_adapter(folder, config, 16)
