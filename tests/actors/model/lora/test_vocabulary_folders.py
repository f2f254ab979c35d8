"""Folders with adapters of embeddings and heads: what is read, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagebus.actors.executor.adapters.reading import HostModule, reader
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import digest_of, open_adapter
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.actors.model.shards.local import local_config
from pagebus.bus.messages import AdapterSource
from tests.helpers.model_factory import make_model

ALL = "embed_tokens", "lm_head"
EMBEDDING, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3, tie_word_embeddings=True)


def both(vocab: int, hidden: int = 64) -> Tensors:
    """As PEFT saves them, with copies of the model's own."""
    shapes = {
        f"{EMBEDDING}.lora_embedding_A": (2, vocab), f"{EMBEDDING}.lora_embedding_B": (hidden, 2),
        f"{HEAD}.lora_A.weight": (2, hidden), f"{HEAD}.lora_B.weight": (vocab, 2),
        f"{EMBEDDING}.base_layer.weight": (vocab, hidden), f"{HEAD}.base_layer.weight": (vocab, hidden),
    }  # fmt: skip
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def save(folder: Path, tensors: Tensors, **fields: object) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **fields}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_each_rank_has_the_embedding_and_its_part_of_the_head(base: Path, tmp_path: Path) -> None:
    config = ModelConfig.load(base)
    tensors = both(config.vocab_size)
    folder = save(tmp_path / "adapter", tensors)
    source = AdapterSource(name="x", path=str(folder), digest=digest_of(open_adapter(folder, config, 2, ALL)))
    parts = []
    for rank in range(2):
        part = local_config(config, rank, 2)
        found = reader(part, 2, torch.float32, ALL)(source).parts(part)
        embedding, head = found["model.embed_tokens"], found["lm_head"]
        assert isinstance(embedding, HostModule)
        assert isinstance(head, HostModule)
        assert torch.equal(embedding.a, tensors[f"{EMBEDDING}.lora_embedding_A"])
        assert torch.equal(embedding.b, tensors[f"{EMBEDDING}.lora_embedding_B"])
        assert torch.equal(head.a, tensors[f"{HEAD}.lora_A.weight"])
        parts.append(head.b)
    assert torch.equal(torch.cat(parts), tensors[f"{HEAD}.lora_B.weight"])


def test_copies_of_the_model_do_not_count(base: Path, tmp_path: Path) -> None:
    config = ModelConfig.load(base)
    tensors = both(config.vocab_size)
    without = {name: each for name, each in tensors.items() if "base_layer" not in name}
    digests = [
        digest_of(open_adapter(save(tmp_path / name, each), config, 2, ALL))
        for name, each in (("with", tensors), ("without", without))
    ]
    assert digests[0] == digests[1]


REFUSED: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("a larger vocabulary", lambda t: t.update({f"{HEAD}.base_layer.weight": torch.ones(400, 64)}), "vocabularies"),
    ("rows of another", lambda t: t.update({f"{HEAD}.lora_B.weight": torch.ones(400, 2)}), "another model"),
    ("columns of another", lambda t: t.update({f"{EMBEDDING}.lora_embedding_A": torch.ones(2, 400)}), "another model"),
    ("NaN", lambda t: t[f"{EMBEDDING}.lora_embedding_B"].fill_(torch.nan), "NaN or infinity"),
    ("half of it", lambda t: t.pop(f"{EMBEDDING}.lora_embedding_B"), "lora_A alone"),
    ("the embedding as a product", lambda t: t.update({f"{EMBEDDING}.lora_A.weight": torch.ones(2, 307)}), "no such"),
    ("the head as an embedding", lambda t: t.update({f"{HEAD}.lora_embedding_A": torch.ones(2, 307)}), "embeddings"),
    ("a whole matrix", lambda t: t.update({f"{HEAD}.weight": torch.ones(307, 64)}), "no such projection"),
    ("a layer's own matrix", lambda t: t.update({
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.ones(256, 64)}), "no such"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), [pytest.param(c, s, id=name) for name, c, s in REFUSED])
def test_refused(base: Path, tmp_path: Path, change: Callable[[Tensors], object], says: str) -> None:
    config = ModelConfig.load(base)
    tensors = both(config.vocab_size)
    change(tensors)
    with pytest.raises(AdapterError) as refused:
        digest_of(open_adapter(save(tmp_path / "bad", tensors), config, 2, ALL))
    assert says in str(refused.value)


def test_what_is_tied_and_what_has_no_room(base: Path, tmp_path: Path) -> None:
    config = ModelConfig.load(base)
    tensors = {name: each for name, each in both(config.vocab_size).items() if EMBEDDING in name}
    with pytest.raises(AdapterError, match="ensure_weight_tying"):
        open_adapter(save(tmp_path / "tied", tensors, ensure_weight_tying=True), config, 2, ALL)
    with pytest.raises(AdapterError, match="no room for embed_tokens: name it in --lora-target-modules"):
        open_adapter(save(tmp_path / "untied", tensors), config, 2)


def test_biases(base: Path, tmp_path: Path) -> None:
    """Of the head's, each rank adds its part. They need room, a shape and matrices beside them, and replace nothing."""
    config, name = ModelConfig.load(base), f"{HEAD}.lora_B.bias"
    tensors = {key: each for key, each in both(config.vocab_size).items() if HEAD in key}
    tensors[name] = torch.randn(config.vocab_size)
    folder = save(tmp_path / "adapter", tensors, bias="lora_only")
    source = AdapterSource(
        name="x", path=str(folder), digest=digest_of(open_adapter(folder, config, 2, (*ALL, "bias")))
    )  # fmt: skip
    parts = []
    for rank in range(2):
        part = local_config(config, rank, 2)
        found = reader(part, 2, torch.float32, (*ALL, "bias"))(source).parts(part)["lm_head"]
        assert isinstance(found, HostModule)
        assert found.bias is not None
        parts.append(found.bias)
    assert torch.equal(torch.cat(parts), 2.0 * tensors[name])
    with pytest.raises(AdapterError, match="no room for biases: name bias in --lora-target-modules"):
        open_adapter(folder, config, 2, ALL)
    for index, (change, says) in enumerate(
        [
            ({name: torch.ones(3)}, "no bias of 307 outputs"),
            ({f"{HEAD}.base_layer.bias": torch.ones(307)}, "biases in place of the model's"),
            ({name: torch.full((307,), torch.nan)}, "NaN or infinity"),
            ({"base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias": torch.ones(256)}, "no room for q_proj"),
        ]
    ):
        bad = save(tmp_path / str(index), tensors | change)
        with pytest.raises(AdapterError, match=says):
            digest_of(open_adapter(bad, config, 2, (*ALL, "bias")))
