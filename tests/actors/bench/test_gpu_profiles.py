"""The tools that profile steps on a GPU still fit the engine: they run here on a CPU, with a tiny model."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

import tests.gpu.bench.decode_step as decode_step
from pagebus.actors.executor.graphs.graphs import padded_pass
from tests.gpu.bench.profile_steps import profile_model
from tests.helpers.model_factory import make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen3", seed=0, max_position_embeddings=4096)


def test_profile_steps(folder: Path) -> None:
    """A workload's steps are told by kind, with the host's time by part."""
    arguments = argparse.Namespace(
        workload="prefill", requests=2, runs=1, max_num_seqs=4, max_cudagraph_capture_size=None, device="cpu",
        enforce_eager=False, trace=None, quantization=None,
    )  # fmt: skip
    (run,) = profile_model(str(folder), arguments)["runs"]
    prompts = next(kind for kind in run["kinds"] if kind["kind"] == "prompts")
    assert prompts["steps"] > 0
    assert {"whole", "forward", "sample"} <= set(prompts["host_ms_p50"])


def test_decode_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a decode step get a token each."""
    monkeypatch.setattr(decode_step, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    step = decode_step.DecodeStep(str(folder), 4, 100, 1000)
    _, logits, tokens = padded_pass(step.runner, step.send(4, 64))
    assert len(logits) == len(tokens) == 4
