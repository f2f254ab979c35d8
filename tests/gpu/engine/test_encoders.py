"""Encoders on CUDA: the flash attention of 16 bits, the padded one of float32, whole servers beside transformers.

Runs on a bare GPU host too: ``PYTHONPATH=. pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib
tests/gpu/engine/test_encoders.py`` (without the last test, which needs the plugin for coroutines).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagebus.actors.executor.batch.buckets import Bucket
from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.graphs.graphs import Passes
from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import build_model
from pagebus.actors.executor.pooling.full_attention import full_attention
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.family import Family
from pagebus.actors.model.pooling.encoders import ENCODERS
from tests.actors.executor.graphs.pooled_numbers import pooled, write_model
from tests.actors.model.pooling.tiny_models import make_encoder
from tests.helpers.engine_driver import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
GOLDEN = [(family, name) for family in ENCODERS for name in family.golden]
CUDA = torch.device("cuda")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("heads", "head_dim"), [(12, 64), (16, 64), (12, 32), (5, 128)])
def test_attention(dtype: torch.dtype, tolerance: float, heads: int, head_dim: int) -> None:
    """Rows of 1 to 700 tokens, beside float32 on the host, row by row."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 63, 64, 65, 129, 700]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    q, k, v = (torch.randn(sum(lengths), heads, head_dim, generator=generator).to(dtype) for _ in range(3))
    expected = full_attention(q.float(), k.float(), v.float(), starts, max(lengths), head_dim**-0.5)
    found = full_attention(q.cuda(), k.cuda(), v.cuda(), starts.cuda(), max(lengths), head_dim**-0.5)
    torch.testing.assert_close(found.float().cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("family", "name"), GOLDEN, ids=[name for _, name in GOLDEN])
@pytest.mark.parametrize("kernels", [True, False])
def test_equal_transformers(family: Family, name: str, kernels: bool, tmp_path: Path) -> None:
    """Float32 hidden states, with our products and with torch's."""
    import transformers

    classifies = "Classification" in family.architectures[0]
    folder = make_encoder(tmp_path, family.model_type, classifies=classifies, **family.golden[name])
    auto = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    reference = auto.from_pretrained(str(folder), dtype=torch.float32).eval()
    config = ModelConfig.load(folder)
    ops = Ops.triton() if kernels else Ops.reference()
    model = build_model(config, CUDA, torch.float32, ops, config.max_position_embeddings)
    load_weights(model, folder, "auto", 0, lambda _: None)
    rng = random.Random(name)
    rows = [torch.tensor([rng.randrange(5, 300) for _ in range(count)]) for count in (1, 17, 33)]
    starts = torch.tensor([0, 1, 18, 51], dtype=torch.int32, device=CUDA)
    positions = torch.cat([torch.arange(len(row)) for row in rows]).int().cuda()
    nothing = torch.empty(0, dtype=torch.int32, device=CUDA)
    batch = AttentionBatch(nothing, starts, nothing, nothing, nothing, 0, longest=33)
    found = model.forward(torch.cat(rows).int().cuda(), positions, nothing, batch).cpu().split([1, 17, 33])
    for row, states in zip(rows, found, strict=True):
        with torch.inference_mode():
            told: Any = reference(row[None], output_hidden_states=True)
        torch.testing.assert_close(states, told.hidden_states[-1][0], atol=2e-4, rtol=2e-4)


SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "max_position_embeddings": 402,
}  # fmt: skip
DECODER = {"num_key_value_heads": 2, "head_dim": 64}
KINDS = [
    ("bert", "cls"), ("bert", "mean"), ("bert", "classes"), ("xlm-roberta", "cls"), ("xlm-roberta", "mean"),
    ("xlm-roberta", "classes"), ("qwen3", "mean"), ("qwen3", "dense"), ("qwen3", "last"),
]  # fmt: skip
LENGTHS = [[1], [7], [128], [400], [1] * 20, [3, 200, 1, 64], [30] * 17, [4] * 60, [300, 300, 300], [5, 390]]


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.02)])
@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_graphs(family: str, kind: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    """What comes out of graphs is what kernels launched one by one compute; the same bits each time."""
    fields = SHAPE | (DECODER if family == "qwen3" else {})
    pooling = write_model(tmp_path, family, kind, **fields)
    rng = random.Random(f"{family} {kind}")
    steps = [[[rng.randrange(5, 300) for _ in range(length)] for length in lengths] for lengths in LENGTHS]
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_model_len": 400, "swap_space": 0}
    driver = Driver(tmp_path, device="cuda", dtype=dtype, num_gpu_blocks_override=200, **settings)
    driver.synchronize()
    runner = driver.engine._loaded.runner
    graphs, replayed = runner.graphs, set[int]()
    assert graphs is not None
    replay = graphs.run

    def noting(bucket: Bucket, passes: Passes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        replayed.add(bucket.tokens)
        assert graphs._captured.get(bucket) is not None
        return replay(bucket, passes)

    graphs.run = noting  # type: ignore[method-assign]
    found, again = pooled(driver, pooling, steps), pooled(driver, pooling, steps[::-1])[::-1]
    runner.graphs = None
    expected = pooled(driver, pooling, steps)
    driver.close()
    assert len(replayed) >= 6
    for ours, same, theirs in zip(found, again, expected, strict=True):
        np.testing.assert_array_equal(np.array(ours), np.array(same))
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=tolerance, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
async def test_served(dtype: str, tolerance: float, tmp_path: Path) -> None:
    """Scores of a reranker, many at once, through the whole system."""
    import transformers

    from tests.system.serving import serving

    folder = make_encoder(tmp_path, "xlm-roberta", classifies=True, num_labels=1)
    texts = [f"the quick fox {number} jumps" for number in range(64)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(str(folder), dtype=torch.float32).eval()
    async with serving(folder, device="cuda", dtype=dtype) as client:
        answer = await client.post("score", text_1="the fox", text_2=texts)
    for text, told in zip(texts, answer["data"], strict=True):
        with torch.inference_mode():
            logits = reference(**tokenizer("the fox", text, return_tensors="pt")).logits
        assert told["score"] == pytest.approx(float(torch.sigmoid(logits[0, 0])), abs=tolerance)
