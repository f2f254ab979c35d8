"""What a model is made of and what it would take, from its configuration and the headers of its files alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from pagebus.actors.executor.device.gpu_limits import check_gpu
from pagebus.actors.executor.explain import CPU, AbsentEngine
from pagebus.actors.executor.loading.head_weights import head_files
from pagebus.actors.executor.loading.limits import cache_format, demand_of
from pagebus.actors.executor.loading.weights import check_files, unmatched_entries
from pagebus.actors.executor.memory.budget import GIB, fixed_kv_bytes
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.settings import Settings, SettingsError
from pagebus.kernels.common.target import Target

NUMBER = re.compile(r"\.\d+(?=\.|$)")
"""The index of a layer or of an expert in a name."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights that differ in their indexes only: ``count`` of them, each of ``shape``; bytes and numbers are those of
    all."""

    name: str
    count: int
    shape: tuple[int, ...]
    format: str
    layout: str
    parameters: int
    bytes: int


class Inspection:
    """A model as ``settings`` ask for it. ``memory_gib``: of the GPU that it is for.

    Raises:
        SettingsError: a CPU cannot do what the settings ask.
        ModelError: parts of one product are quantized in different ways.
    """

    def __init__(
        self, settings: Settings, config: ModelConfig, target: Target | None, path: Path, memory_gib: float | None
    ) -> None:
        engine = AbsentEngine(settings, config, target)
        self._settings, self._config, self._target, self._path = settings, config, target, path
        self._engine, self._memory_gib = engine, memory_gib
        self.parameters = engine.runner.model.parameters
        self.groups = _groups(self._weights())

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        quantization, settings, limits = self._config.quantization, self._settings, self._engine.runner.limits
        head = head_files(settings, self._config)
        block_bytes = cache_format(settings, self._config, self._engine.dtype, head).block_bytes
        return {
            "architecture": self._config.architecture,
            "quantization": None if quantization is None else quantization.method,
            "parameters": sum(group.parameters for group in self.groups),
            "bytes": self.parameters.num_bytes(),
            "weights": [asdict(group) for group in self.groups],
            "unmatched_entries": unmatched_entries(self._engine.runner.model),
            "files": self._files(),
            "kv_cache": {
                "block_size": settings.block_size,
                "block_bytes": block_bytes,
                "bytes_per_token": block_bytes * (1 + limits.windowed_pages) / settings.block_size,
                "most_blocks": self._most_blocks(block_bytes),
                "window": limits.windowed_tokens or limits.window,
                "windowed_pages": limits.windowed_pages,
                "sequence_blocks": demand_of(limits, block_bytes).least_blocks,
            },
            "runs": self._runs(),
        }

    def _weights(self) -> Iterator[WeightGroup]:
        """One by one, in the order in which the model asked for them."""
        for ways in self.parameters.parts:
            for part in ways[0]:
                shape, layout = part.weight.shape, type(part.weight).__name__
                size = part.num_bytes
                yield WeightGroup(part.module, 1, shape, str(part.scheme), layout, prod(shape), size)
        for name, view in self.parameters.views.items():
            kind = str(view.dtype).removeprefix("torch.")
            yield WeightGroup(name, 1, tuple(view.shape), kind, "", view.numel(), view.nbytes)

    def _files(self) -> str:
        """Whether the tensors that are wanted are there, by the files' headers."""
        try:
            check_files(self._engine.runner.model, self._path)
        except ModelError as error:
            return str(error)
        return "complete"

    def _most_blocks(self, block_bytes: int) -> int | None:
        """Of the cache beside the weights; activations and graphs take some of them on a GPU. None: the memory of the
        GPU is not known."""
        limits, settings = self._engine.runner.limits, self._settings
        demand = demand_of(limits, block_bytes)
        fixed = fixed_kv_bytes(settings, demand.block_bytes, CPU if self._target is None else self.parameters.device)
        if fixed is None and self._memory_gib is not None:
            total = int(self._memory_gib * GIB * settings.gpu_memory_utilization)
            fixed = max(0, total - self.parameters.num_bytes())
        return None if fixed is None else fixed // block_bytes

    def _runs(self) -> dict[str, str]:
        """What computes the steps."""
        if self._config.quantization is None:
            return self._engine.runner.chooser.summary()
        if self._target is None:
            return {"products": "with dequantized weights, on the CPU"}
        try:
            check_gpu(self._settings, self._config, self._target)
        except SettingsError as error:
            return {"products": f"refused: {error}"}
        return self._engine.runner.chooser.summary()


def _groups(weights: Iterator[WeightGroup]) -> list[WeightGroup]:
    """Those of all layers and experts together, as far as they are alike."""
    found: dict[tuple[object, ...], WeightGroup] = {}
    for each in weights:
        name = NUMBER.sub(".*", each.name)
        key = name, each.shape, each.format
        known = found.get(key)
        count, parameters, size = (0, 0, 0) if known is None else (known.count, known.parameters, known.bytes)
        found[key] = WeightGroup(
            name, count + 1, each.shape, each.format, each.layout, parameters + each.parameters, size + each.bytes
        )
    return list(found.values())
