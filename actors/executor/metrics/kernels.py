"""Counters of the kernels that steps ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pagebus.actors.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from pagebus.actors.executor.step.step_kernels import StepKernels

PATHS = ("pagebus:attention_steps_total", "Steps by the path that attention took.")
PRODUCTS = ("pagebus:product_steps_total", "Steps by the kernel that a product got.")


class KernelMetrics:
    """Steps by attention path, and by the kernel of each product."""

    def __init__(self, metrics: Metrics, engine: str) -> None:
        self._metrics = metrics
        self._engine = engine

    def update(self, steps: Mapping[StepKernels, int]) -> None:
        """``steps`` are all so far; another thread may go on counting them."""
        paths: Counter[str] = Counter()
        products: Counter[tuple[str, str]] = Counter()
        for kernels, count in list(steps.items()):
            paths[kernels.attention] += count
            for product, choice in kernels.products.items():
                products[product, choice.kernel] += count
        for path, count in paths.items():
            self._set(count, *PATHS, path=path)
        for (product, kernel), count in products.items():
            self._set(count, *PRODUCTS, product=product, kernel=kernel)

    def _set(self, count: int, name: str, text: str, **labels: str) -> None:
        self._metrics.counter(name, text, engine=self._engine, **labels).rise_to(count)


def always_dequantized(kernels: Mapping[str, str]) -> list[str]:
    """The products whose quantized weights no kernel reads, not even for one token; ``kernels`` as an engine sums them
    up."""
    return [name for name, line in kernels.items() if line.startswith(("dequantized", "moe_dequantized"))]
