"""Times of experts that were measured on an H200, from the raw output of `tests.gpu.bench.bench_moe`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pagebus.kernels.moe.launch.shapes import Config, GroupConfig, Grouped, PairConfig, Shape, Specialized, Unsorted
from pagebus.kernels.specialized.hopper_gemm import SpecializedConfig

FOLDER = Path(__file__).parents[3] / "docs" / "measurements" / "h200-issue18"
MODELS = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768), "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880), "mixtral-8x7b": Shape(8, 2, 4096, 14336),
}  # fmt: skip
TYPES = {each.__name__: each for each in (Grouped, GroupConfig, PairConfig, Specialized, SpecializedConfig, Unsorted)}
TILES = Grouped(128, GroupConfig(64, 64, 3, 8, tma=True), GroupConfig(128, 64, 3, 8, tma=True))
"""What "old" stands for in `experts-hopper.txt`."""


class Measured(NamedTuple):
    """Microseconds of a layer of a model's experts."""

    model: str
    tokens: int
    config: Config
    us: float

    @property
    def shape(self) -> Shape:
        return MODELS[self.model]


def measured(*names: str) -> Iterator[Measured]:
    """All that was timed as a whole, in these files: what was chosen, and the best that were tried."""
    last: Measured | None = None
    for line in (line for name in names for line in (FOLDER / name).read_text().splitlines()):
        model, _, rest = line.partition(" ")
        if model not in MODELS:
            yield from _ranked(line.strip(), last)
            continue
        words = rest.split()
        if "old" in words:
            yield from _hopper(model, int(words[0]), rest)
        elif found := re.search(r"(\w+\(.*\))$", rest):
            tried = re.search(r": +([\d.]+) us, floor", rest)
            last = Measured(model, int(words[0]), _config(found[1]), float(tried[1] if tried else words[3]))
            yield last


def _ranked(line: str, last: Measured | None) -> Iterator[Measured]:
    """The line of a ranking: launch shapes of one of both products, the other of which is plain."""
    product, _, rest = line.partition(": ")
    if last is None or not isinstance(last.config, Grouped) or product not in ("gate_up", "down"):
        return
    size = last.config.tokens
    plain = GroupConfig(64, 64, 3, 8 if size >= 128 else 4, tma=True)
    for each in rest.split("; "):
        us, _, text = each.partition(" ")
        one = _value(ast.parse(text, mode="eval").body)
        assert isinstance(one, GroupConfig)
        config = Grouped(size, one, plain) if product == "gate_up" else Grouped(size, plain, one)
        yield last._replace(config=config, us=float(us))


def _hopper(model: str, tokens: int, text: str) -> Iterator[Measured]:
    """A line of `experts-hopper.txt`: Triton's tiles, and Hopper's kernel with rows of both products."""
    times = dict(re.findall(r"(old|\d+/\d+) ([\d.]+)us", text))
    for name, us in times.items():
        if name == "old":
            yield Measured(model, tokens, TILES, float(us))
        else:
            gate_up, down = (SpecializedConfig(int(rows)) for rows in name.split("/"))
            yield Measured(model, tokens, Specialized(128, gate_up, down), float(us))


def _config(text: str) -> Config:
    """What a launch shape's ``repr`` says."""
    call = ast.parse(text, mode="eval").body
    found = _value(call)
    assert isinstance(found, Grouped | Specialized | Unsorted)
    return found


def _value(node: ast.expr) -> object:
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    assert isinstance(node.func, ast.Name)
    return TYPES[node.func.id](**{each.arg: _value(each.value) for each in node.keywords if each.arg})
