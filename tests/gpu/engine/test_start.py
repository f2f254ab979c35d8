"""Starting on a GPU: kernels that were compiled without it are found, and weights arrive as they were stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import build_model
from pagebus.actors.model.config import ModelConfig
from tests.helpers.model_factory import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

ROOT = Path(__file__).parents[3]
OPTIONS = ["--max-model-len", "512", "--max-num-seqs", "16", "--dtype", "bfloat16", "--load-format", "dummy"]
RUN_ENGINE = """
import json, sys
from pathlib import Path
from triton import knobs
compiled = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: compiled.append((src.name, cache_hit))
from tests.helpers.engine_driver import Driver
settings = {"max_model_len": 512, "max_num_seqs": 16, "dtype": "bfloat16", "load_format": "dummy", "device": "cuda"}
driver = Driver(Path(sys.argv[1]), **settings)
scheduler = driver.scheduler()
for length in (1, 40, 300):
    for params in ({}, {"temperature": 1.0, "top_k": 5, "logprobs": 2}, {"repetition_penalty": 1.2}):
        scheduler.add([1] * length, 8, **params)
driver.drive(scheduler)
driver.close()
print(json.dumps(compiled))
"""


def run(arguments: list[str], environ: dict[str, str]) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environ}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_kernels_compiled_without_the_gpu_are_all_that_an_engine_needs(tmp_path: Path) -> None:
    """With CUDA hidden the command fills a cache; an engine that starts with it, and serves, compiles nothing."""
    folder = make_model(tmp_path / "model", "qwen2", seed=1)
    major, minor = torch.cuda.get_device_capability()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    target = ["--target", f"sm_{10 * major + minor}", "--multiprocessors", str(count)]
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}

    run(
        ["-m", "pagebus.actors.commands.cli", "compile-kernels", str(folder), *OPTIONS, *target],
        {**cache, "CUDA_VISIBLE_DEVICES": ""},
    )
    looked_up = json.loads(run(["-c", RUN_ENGINE, str(folder)], cache).splitlines()[-1])

    assert len(looked_up) > 10
    assert {name for name, hit in looked_up if not hit} == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_reach_the_device_unchanged(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small pieces, through buffers that are used again and again, converted on the device where need be."""
    monkeypatch.setattr("pagebus.actors.executor.loading.weight_copy.PIECE_BYTES", 1 << 10)
    folder = make_model(tmp_path / "model", "qwen2", seed=1)
    stored = load_file(folder / "model.safetensors")
    model = build_model(ModelConfig.load(folder), torch.device("cuda"), dtype, Ops.triton(), max_model_len=32)

    load_weights(model, folder, "auto", 0, lambda _: None)

    for name, view in model.parameters.views.items():
        assert torch.equal(view.cpu(), stored[name].to(dtype)), name
