"""Encoders beside transformers in float32: hidden states of rows of any lengths, in any batch, and classifiers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import Model, build_model
from pagebus.actors.executor.pooling.full_attention import _padded, full_attention
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.family import Family
from pagebus.actors.model.pooling.encoders import ENCODERS
from pagebus.bus.messages.segments import SEGMENT_SHIFT
from tests.actors.model.pooling.tiny_models import make_encoder

GOLDEN = [(family, name) for family in ENCODERS for name in family.golden]
CPU = torch.device("cpu")
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    config = ModelConfig.load(folder)
    model = build_model(config, CPU, dtype, Ops.reference(), config.max_position_embeddings)
    load_weights(model, folder, "auto", 0, lambda _: None)
    return model


def hidden(model: Model, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of rows of ids, with segments in them, in one pass."""
    lengths = torch.tensor([len(row) for row in rows])
    starts = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    positions = torch.cat([torch.arange(len(row)) for row in rows]).int()
    nothing = torch.empty(0, dtype=torch.int32)
    batch = AttentionBatch(nothing, starts, nothing, nothing, nothing, 0, longest=int(lengths.max()))
    found = model.forward(torch.cat(rows).int(), positions, nothing, batch)
    return list(found.split(lengths.tolist()))


def reference(folder: Path, classifies: bool) -> Any:
    import transformers

    auto = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    return auto.from_pretrained(str(folder), dtype=torch.float32).eval()


@pytest.mark.parametrize(("family", "name"), GOLDEN, ids=[name for _, name in GOLDEN])
def test_equal_transformers(family: Family, name: str, tmp_path: Path) -> None:
    """Rows of 1, 17 and as many tokens as there are positions, one with two segments, alone and together."""
    classifies = "Classification" in family.architectures[0]
    folder = make_encoder(tmp_path, family.model_type, classifies=classifies, **family.golden[name])
    model, expected = load(folder), reference(folder, classifies)
    rng, encoder = random.Random(name), model.config.spec.encoder
    assert encoder is not None
    rows = [torch.tensor([rng.randrange(5, 300) for _ in range(count)])
            for count in (1, 17, model.config.max_position_embeddings)]  # fmt: skip
    segments = [torch.zeros_like(row) for row in rows]
    if encoder.types > 1:
        segments[1][9:] = 1
    given = [row | (segment << SEGMENT_SHIFT) for row, segment in zip(rows, segments, strict=True)]

    together = hidden(model, given)
    for row, segment, one, found in zip(rows, segments, given, together, strict=True):
        torch.testing.assert_close(hidden(model, [one])[0], found, **TOLERANCE)
        with torch.inference_mode():
            told = expected(row[None], token_type_ids=segment[None], output_hidden_states=True)
        torch.testing.assert_close(found, told.hidden_states[-1][0], **TOLERANCE)
        if classifies:
            assert model.pooled_head is not None
            torch.testing.assert_close(model.pooled_head(found[:1])[0], told.logits[0], **TOLERANCE)


def test_old_names_of_norms(tmp_path: Path) -> None:
    """Files from before 2019 call weight and bias gamma and beta, and keep a table of positions."""
    from safetensors.torch import load_file, save_file

    folder = make_encoder(tmp_path, "bert")
    tensors = load_file(str(folder / "model.safetensors"))
    ids = torch.arange(5, 25)
    (before,) = hidden(load(folder), [ids])
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, tensor in tensors.items():
        end = next((new for now, new in renamed.items() if name.endswith(now)), None)
        old[f"bert.{name}" if end is None else f"bert.{name.rsplit('LayerNorm', 1)[0]}{end}"] = tensor
    save_file({**old, "bert.embeddings.position_ids": torch.arange(66)[None]}, str(folder / "model.safetensors"))
    (after,) = hidden(load(folder), [ids])
    torch.testing.assert_close(after, before, atol=0, rtol=0)


def test_padded_rows_attend_as_rows_do() -> None:
    """What float32 does on CUDA."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(30, 3, 8, generator=generator) for _ in range(3))
    starts = torch.tensor([0, 1, 18, 30], dtype=torch.int32)
    expected = full_attention(q, k, v, starts, 17, 0.3)
    torch.testing.assert_close(_padded(q, k, v, starts, 17, 0.3), expected, **TOLERANCE)


def test_each_family_has_three_models() -> None:
    """And no two models have one name."""
    assert {len(family.golden) for family in ENCODERS} == {3}
    assert len({name for _, name in GOLDEN}) == len(GOLDEN)
