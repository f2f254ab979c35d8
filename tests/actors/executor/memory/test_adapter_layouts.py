"""Layouts: what is worked out once puts each number where laying out matrix by matrix does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagebus.actors.bench.driver.loras import write_adapters
from pagebus.actors.executor.adapters.images import Image, ImageMaker, Product
from pagebus.actors.executor.adapters.layouts import Layouts
from pagebus.actors.executor.adapters.reading import AdapterNumbers, HostAdapter, Read, reader
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import digest_of, open_adapter
from pagebus.actors.model.lora.projections import projections
from pagebus.actors.model.shards.local import local_config
from pagebus.bus.messages import AdapterSource
from tests.helpers.model_factory import make_golden

SIZES = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
PAGE = 4096
Tensors = dict[str, torch.Tensor]


class Images(ImageMaker):
    """Counts adapters that are laid out matrix by matrix."""

    num_made = 0

    def image(self, adapter: HostAdapter) -> Image:
        self.num_made += 1
        return super().image(adapter)


def model(folder: Path, kind: str = "llama", **fields: Any) -> ModelConfig:
    return ModelConfig.load(make_golden(folder, kind, SIZES | fields))


def images_of(config: ModelConfig, targets: tuple[str, ...] = (), dtype: torch.dtype = torch.bfloat16) -> Images:
    products = [Product(each, each.widths) for each in projections(config, targets)]
    return Images(products, dtype, PAGE)


def saved(
    folder: Path, tensors: Tensors, config: ModelConfig, targets: tuple[str, ...], **fields: Any
) -> AdapterSource:
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 16, "lora_alpha": 4, **fields}))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / WEIGHTS)
    digest = digest_of(open_adapter(folder, config, 16, targets))
    return AdapterSource(name=folder.name, path=str(folder), digest=digest)


def check(layouts: Layouts, images: Images, adapter: AdapterNumbers, config: ModelConfig, *, made: int) -> None:
    """An image is what the other way makes, which was gone ``made`` times."""
    before, image = images.num_made, layouts.image(adapter)
    assert images.num_made - before == made
    wanted = images.image(adapter.parts(config))
    assert [len(each) for each in image.chunks] == [len(each) for each in wanted.chunks]
    assert torch.equal(torch.cat(image.chunks), torch.cat(wanted.chunks))
    assert image.length > 0
    for found, expected in zip(image[1:], wanted[1:], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rank", [8, 12, 16])
def test_adapters_that_were_trained_alike(rank: int, ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """They differ in scales; of each rank of the model too. 12 of 16 ranks have zeros behind them, in small units."""
    config = model(tmp_path / "base")
    for number in range(ranks):
        part = local_config(config, number, ranks) if ranks > 1 else config
        images, read = images_of(part, dtype=dtype), reader(part, 16, dtype)
        layouts = Layouts(images, part)
        for source in write_adapters(tmp_path / f"loras-{number}", config, 3, rank):
            check(layouts, images, read(source), part, made=int(rank == 12))


@pytest.mark.parametrize("form", [torch.float16, torch.float32])
def test_files_of_other_formats(form: torch.dtype, tmp_path: Path) -> None:
    """Numbers are rounded as each tensor's are. Two formats take turns in one of the files."""
    config = model(tmp_path / "base")
    (source,) = write_adapters(tmp_path / "loras", config, 1, 16)
    tensors = load_file(Path(source.path) / WEIGHTS)
    mixed = {name: each.to(form) if index % 3 else each for index, (name, each) in enumerate(tensors.items())}
    images, read = images_of(config), reader(config, 16, torch.bfloat16)
    layouts = Layouts(images, config)
    for name, each in (("one", {name: each.to(form) for name, each in tensors.items()}), ("mixed", mixed)):
        check(layouts, images, read(saved(tmp_path / name, each, config, ())), config, made=0)


def by_head(width: int) -> torch.Tensor:
    """Outputs of heads that are in another order."""
    return torch.arange(width).view(-1, 64)[torch.randperm(width // 64)].flatten()


def test_some_modules_and_heads_in_another_order(tmp_path: Path) -> None:
    """q and v of one layer, whose products have their heads in the order of the linear, and the head of the model."""
    config, targets = model(tmp_path / "base", vocab_size=512), ("q_proj", "v_proj", "lm_head")
    (source,) = write_adapters(tmp_path / "loras", config, 1, 16)
    tensors = {
        name: each
        for name, each in load_file(Path(source.path) / WEIGHTS).items()
        if "layers.1.self_attn.q" in name or "layers.1.self_attn.v" in name
    }
    head = {"A": (16, 256), "B": (512, 16)}
    tensors |= {f"base_model.model.lm_head.lora_{name}.weight": torch.randn(shape) for name, shape in head.items()}
    images = images_of(config, targets)
    images.products = [each._replace(order=by_head(sum(each.widths))) for each in images.products]
    adapter = reader(config, 16, torch.bfloat16, targets)(saved(tmp_path / "x", tensors, config, targets))
    check(Layouts(images, config), images, adapter, config, made=0)


def experts(config: ModelConfig, *, stacked: bool) -> Tensors:
    prefix, shapes = "base_model.model.model.layers.1.mlp.experts", dict[str, tuple[int, int]]()
    if stacked:
        shapes = {"lora_A": (4 * 16, 64), "lora_B": (256, 16 * 4)}
        return {f"{prefix}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    for number in (0, 1, 3):
        for part, inputs, outputs in (("gate_proj", 256, 64), ("up_proj", 256, 64), ("down_proj", 64, 256)):
            shapes |= {f"{number}.{part}.lora_A": (16, inputs), f"{number}.{part}.lora_B": (outputs, 16)}
    return {f"{prefix}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("stacked", [False, True])
def test_experts(tmp_path: Path, *, stacked: bool) -> None:
    """One by one their matrices lie together. In one tensor those of all experts take turns, and are laid out anew."""
    config, targets = model(tmp_path / "base", "qwen3_moe", **EXPERTS), ("experts",)
    images, read = images_of(config, targets), reader(config, 16, torch.bfloat16, targets)
    layouts, told = Layouts(images, config), {"target_parameters": ["down_proj"], "peft_version": "0.21.2"}
    for alpha in (4, 8):
        fields = {"lora_alpha": alpha, **(told if stacked else {})}
        source = saved(tmp_path / f"{alpha}", experts(config, stacked=stacked), config, targets, **fields)
        check(layouts, images, read(source), config, made=int(stacked))


def test_biases_are_laid_out_anew(tmp_path: Path) -> None:
    """They are multiplied by the adapter's scale."""
    config, targets = model(tmp_path / "base"), (*ATTENTION, "bias")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": torch.randn(15, 256), f"{prefix}.lora_B.weight": torch.randn(256, 15),
        f"{prefix}.lora_B.bias": torch.randn(256),
    }  # fmt: skip
    images, read = images_of(config, targets), reader(config, 16, torch.bfloat16, targets)
    source = saved(tmp_path / "x", tensors, config, targets, r=15)
    check(Layouts(images, config), images, read(source), config, made=1)


def calls_of(action: Callable[[], object]) -> int:
    """Calls of functions, Python's and others: between any two Python's lock may go to another thread, and after most
    it has to be waited for."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_what_was_trained_alike_takes_few_calls(tmp_path: Path) -> None:
    """Steps want Python's lock meanwhile. Of a second adapter each module costs a look at its scale, and no more. What
    else is called while one is used, such as when garbage is collected, is not called with each."""
    counts = []
    for layers in (2, 6):
        config = model(tmp_path / f"base-{layers}", num_hidden_layers=layers)
        layouts, read = Layouts(images_of(config), config), reader(config, 16, torch.bfloat16)
        first, *others = write_adapters(tmp_path / f"loras-{layers}", config, 4, 16)
        layouts.image(read(first))
        counts.append(min(calls_of(partial(use, layouts, read, other)) for other in others))
    assert counts[0] < 1000
    assert counts[1] - counts[0] <= 4 * 7 * 3


def use(layouts: Layouts, read: Read, source: AdapterSource) -> None:
    layouts.image(read(source))
