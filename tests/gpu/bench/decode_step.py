"""The decode step that benchmarks and profiles replay: of one of SHAPES, or of a folder with a ``config.json``."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.executor.tuning import decode_step
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.shards.local import local_config
from pagebus.actors.settings import Settings

CUDA = torch.device("cuda", 0)


class DecodeStep(decode_step.DecodeStep):
    """Of the model of this ``name`` (:func:`model_folder`); with a ``world`` of ranks, of the first one alone.
    ``quantization``: as of ``--quantization``."""

    def __init__(
        self, name: str, max_rows: int, max_context: int, num_tokens: int, cache_dtype: torch.dtype = torch.bfloat16,
        world: int = 1, quantization: str | None = None,
    ) -> None:  # fmt: skip
        torch.cuda.set_device(CUDA)
        with tempfile.TemporaryDirectory() as parent:
            folder = model_folder(name, Path(parent))
            asked = with_quantization(Settings(model=str(folder), quantization=quantization), ModelConfig.load(folder))
            config = local_config(asked, 0, world)
        super().__init__(config, CUDA, max_rows, max_context, num_tokens, cache_dtype=cache_dtype)


def model_folder(name: str, parent: Path) -> Path:
    """Of one of SHAPES, written into ``parent``; of a folder that has a ``config.json``, itself."""
    return write_model_folder(name, parent) if name in SHAPES else Path(name)


def replay_ms(replay: Callable[[], None], count: int = 30) -> float:
    """Median time between the ends of replays that are queued one behind the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 5)]
    for event in events:
        replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events[4:]))
