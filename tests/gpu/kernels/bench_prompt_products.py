"""Times gate and up products of prompts while the GPU is warm: `python -m tests.gpu.kernels.bench_prompt_products`.

The library's product with the activation behind it, and ours that activates its tiles, each with the library's product
down behind it, by turns for hundredths of a second each: power bounds such steps. Prints microseconds of both products.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

import torch
import torch.nn.functional as F

from pagebus.kernels.linear.activation import activation_mul
from pagebus.kernels.linear.linear import gated_linear
from pagebus.kernels.specialized.hopper_prompts import PromptConfig

CUDA = torch.device("cuda")
SIZES = {
    "gemma2-9b": (14336, 3584), "llama8b": (14336, 4096), "qwen2.5-7b": (18944, 3584), "glm4-9b": (13696, 4096),
    "gemma3-12b": (15360, 3840), "phi4-14b": (17920, 5120), "qwen2.5-32b": (27648, 5120), "gemma2-2b": (9216, 2304),
    "qwen2.5-3b": (11008, 2048), "llama3.2-1b": (8192, 2048), "phi3-mini": (8192, 3072), "qwen2.5-1.5b": (8960, 1536),
    "qwen3-0.6b": (3072, 1024), "llama8b-tp2": (7168, 4096), "llama70b-tp2": (14336, 8192),
}  # fmt: skip
"""Width and inputs."""
TOKENS = (1056, 2048, 4096, 8192)
ROTATED_BYTES = 400_000_000


class Pair:
    """Both products of some layers."""

    def __init__(self, width: int, inputs: int, tokens: int) -> None:
        count = max(2, ROTATED_BYTES // (6 * width * inputs))
        self._gates = [torch.randn(2 * width, inputs, dtype=torch.bfloat16, device=CUDA) * 0.02 for _ in range(count)]
        self._downs = [torch.randn(inputs, width, dtype=torch.bfloat16, device=CUDA) * 0.02 for _ in range(count)]
        self._x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=CUDA)

    def run(self, config: PromptConfig | None, count: int) -> None:
        for index in range(count):
            gate, down = self._gates[index % len(self._gates)], self._downs[index % len(self._gates)]
            F.linear(self.product(gate, config), down)

    def product(self, gate: torch.Tensor, config: PromptConfig | None) -> torch.Tensor:
        if config is None:
            return activation_mul(F.linear(self._x, gate))
        return gated_linear(self._x, gate, None, config=config)

    def error(self, config: PromptConfig) -> float:
        expected, found = (self.product(self._gates[0], each).float() for each in (None, config))
        return float((found - expected).norm() / expected.norm())


def microseconds(pair: Pair, config: PromptConfig | None, count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    pair.run(config, count)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def line(name: str, tokens: int, configs: dict[str, PromptConfig | None], rounds: int, ms: float) -> str:
    pair = Pair(*SIZES[name], tokens)
    errors = [pair.error(config) for config in configs.values() if config is not None]
    count = max(8, int(ms * 1e3 / microseconds(pair, None, 8)))
    times = defaultdict(list)
    for _ in range(rounds):
        for each, config in configs.items():
            pair.run(config, count // 4)
            times[each].append(microseconds(pair, config, count))
    medians = [statistics.median(found[1:]) for found in times.values()]
    ratios = " ".join(f"{median:9.1f} ({median / medians[0]:.3f})" for median in medians[1:])
    return f"{name:14} {tokens:6} {medians[0]:9.1f} {ratios}  error {max(errors):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=["11"], help="fields of PromptConfig")
    parser.add_argument("--models", nargs="+", default=[*SIZES], help="-tp2: of one of two ranks")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, default=60.0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    configs = {"library": None} | {
        each: PromptConfig(*map(int, each.split(","))) for each in arguments.configs
    }  # fmt: skip
    print(f"{torch.cuda.get_device_name()}; us: library, {', '.join(arguments.configs)} (share of the library's)")
    for name in arguments.models:
        for tokens in arguments.tokens:
            print(line(name, tokens, configs, arguments.rounds, arguments.ms), flush=True)


if __name__ == "__main__":
    main()
