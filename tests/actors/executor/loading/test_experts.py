"""Experts' weights by every name that files have for them, straight into the stacked tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.model.config import ModelError
from pagebus.actors.model.families.experts import gpt_oss, mixtral, qwen_moe
from pagebus.actors.model.family import Family
from tests.actors.executor.models.test_families import PagedSequences, load, whole_logits
from tests.helpers.model_factory import make_golden

Tensors = dict[str, torch.Tensor]
PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MODELS = [(qwen_moe.QWEN3_MOE, "qwen3-moe"), (qwen_moe.QWEN2_MOE, "qwen2-moe"), (mixtral.FAMILY, "mixtral-odd")]
IDS = [5, 250, 17, 99, 3] * 9


def stacked(tensors: Tensors) -> Tensors:
    """As transformers 5 has them in memory: one tensor for all experts of a layer, gates before ups."""
    found: Tensors = {}
    parts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in sorted(tensors, key=lambda name: [int(number) for number in re.findall(r"\d+", name)]):
        split = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name)
        if split is None:
            found[name] = tensors[name]
        else:
            parts.setdefault(split[1], {}).setdefault(PARTS.get(split[2], split[2]), []).append(tensors[name])
    for prefix, of in parts.items():
        pairs = zip(of["gate_proj"], of["up_proj"], strict=True)
        found[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        found[f"{prefix}.down_proj"] = torch.stack(of["down_proj"])
    return found


def in_other_words(tensors: Tensors) -> Tensors:
    """w1, w3, w2 for gate_proj, up_proj, down_proj of experts, and the reverse."""
    swap = PARTS | {ours: theirs for theirs, ours in PARTS.items()}
    return {
        re.sub(r"(\.experts\.\d+\.)(\w+)", lambda found: found[1] + swap[found[2]], name): tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("change", [stacked, in_other_words])
@pytest.mark.parametrize(("family", "name"), MODELS, ids=[name for _, name in MODELS])
def test_every_spelling_is_read(
    family: Family, name: str, change: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    """The logits are those of transformers with the file as it saves it, one expert by one, and with other names."""
    folder = make_golden(tmp_path, family.model_type, family.golden[name])
    got, expected = whole_logits(folder, IDS, 64)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)

    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors)
    assert set(changed) != set(tensors)
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, file)
    again = PagedSequences(load(folder, 64), 1).forward([IDS])[0][-1]
    assert torch.equal(again, got)


def unwoven(tensors: Tensors) -> Tensors:
    """gpt-oss's experts one by one, as tools that quantize them write them."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in set(tensors) - set(found):
        prefix, part = name.rsplit(".", 1)
        kind = "bias" if part.endswith("_bias") else "weight"
        for index, expert in enumerate(tensors[name]):
            rows = expert if kind == "bias" else expert.t()
            parts = {"gate_proj": rows[::2], "up_proj": rows[1::2]} if "gate_up" in part else {"down_proj": rows}
            found |= {f"{prefix}.{index}.{ours}.{kind}": part for ours, part in parts.items()}
    return found


def test_experts_by_inputs_and_by_turns(tmp_path: Path) -> None:
    """As gpt-oss's files have them: the bits of the same experts one by one. Loading again changes nothing."""
    family = gpt_oss.FAMILY
    folder = make_golden(tmp_path, family.model_type, family.golden["gpt-oss-odd"])
    got, expected = whole_logits(folder, IDS, 64)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)

    model = load(folder, 64)
    load_weights(model, folder, "auto", 0, lambda _: None)
    assert torch.equal(PagedSequences(model, 1).forward([IDS])[0][-1], got)
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in unwoven(load_file(file)).items()}, file)
    assert torch.equal(PagedSequences(load(folder, 64), 1).forward([IDS])[0][-1], got)


def test_each_expert_fills_its_part(tmp_path: Path) -> None:
    """Views of the stacked tensors, so nothing is copied twice; the tensors are counted once."""
    family, name = MODELS[0]
    folder = make_golden(tmp_path, family.model_type, family.golden[name])
    parameters, stored = load(folder).parameters, load_file(folder / "model.safetensors")
    assert set(parameters.views) == set(stored)
    for each, view in parameters.views.items():
        assert torch.equal(view, stored[each]), each
    owners = {tensor.untyped_storage().data_ptr() for tensor in parameters.tensors}
    assert {view.untyped_storage().data_ptr() for view in parameters.views.values()} == owners
    assert parameters.num_bytes() == sum(tensor.nbytes for tensor in stored.values())


@pytest.mark.parametrize("lost", ["experts.3.up_proj", "experts.0.down_proj", "mlp.gate.weight"])
def test_a_lost_expert_is_named(lost: str, tmp_path: Path) -> None:
    """By the name that the file would have for it."""
    family, name = MODELS[0]
    folder = make_golden(tmp_path, family.model_type, family.golden[name])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    gone = next(each for each in tensors if lost in each)
    del tensors[gone]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=f"lack tensor {re.escape(gone)}"):
        load(folder)
