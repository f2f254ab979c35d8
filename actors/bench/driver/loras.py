"""Random adapters for a deployment under measurement, as folders that it reads like any other."""

from __future__ import annotations

import json
import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.adapter import CONFIG, WEIGHTS, AdapterFolders, digest_of
from pagebus.actors.model.lora.projections import projections
from pagebus.bus.messages import AdapterSource

STD = 0.01
"""Of the random numbers."""


def write_adapters(folder: Path, model: ModelConfig, count: int, rank: int) -> tuple[AdapterSource, ...]:
    """Write ``count`` adapters of all projections of a model in bfloat16, and say where they are.

    They share their weights in one file, linked into each folder, and differ in their scales. So each has a digest, is
    read and takes memory like any other, and a thousand need no more disk than one.

    Raises:
        AdapterError: the model has nothing to adapt.
    """
    folder.mkdir(parents=True)
    weights = folder / WEIGHTS
    _write_weights(weights, model, rank)
    folders = AdapterFolders(model, rank)

    def written(index: int) -> AdapterSource:
        name = f"lora-{index}"
        (folder / name).mkdir()
        os.link(weights, folder / name / WEIGHTS)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * (1.0 + index / count)}
        (folder / name / CONFIG).write_text(json.dumps(config))
        digest = digest_of(folders.open(folder / name))
        return AdapterSource(name=name, path=str(folder / name), digest=digest)

    with ThreadPoolExecutor() as pool:  # what takes long is the digest, which is computed beside Python
        return tuple(pool.map(written, range(count)))


def _write_weights(file: Path, model: ModelConfig, rank: int) -> None:
    """A safetensors file with A [rank, inputs] and B [outputs, rank] of every module."""
    shapes = {}
    for projection in projections(model):
        for module, width in zip(projection.modules, projection.widths, strict=True):
            shapes[f"base_model.model.{module}.lora_A.weight"] = (rank, projection.inputs)
            shapes[f"base_model.model.{module}.lora_B.weight"] = (width, rank)
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    text, draws = json.dumps(header).encode(), np.random.default_rng(0)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            values = draws.standard_normal(shape, np.float32) * np.float32(STD)
            stream.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
