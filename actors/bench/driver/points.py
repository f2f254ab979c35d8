"""The workloads of ``pagebus bench engine``: points, each a set of requests submitted at once, and their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagebus.actors.bench.driver.requests import scaled
from pagebus.actors.simulator.recording.trace import Trace, make_trace
from pagebus.actors.simulator.workloads import make_workload

DECODE_PROMPT, DECODE_STEPS = 512, 128
PREFIX_TOKENS, TAIL_TOKENS = 15_000, 64
SWAPPED_TOKENS = 16_384
LONG_PROMPTS, LONG_OUTPUT = (("8k", 8_192), ("32k", 32_768), ("131k", 130_944)), 128
"""The longest and its output are 131 072 together."""


@dataclass(frozen=True, slots=True)
class Point:
    """Requests of one row of the table. Points of a workload run one after another, on the same cache.

    ``batch`` above 0: the row is about steps that decode exactly that many. A point that is not ``shown`` only
    prepares.
    """

    name: str
    trace: Trace
    temperature: float = 0.0
    batch: int = 0
    shown: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """``settings`` are what the workload needs of the deployment; what the user gives goes before them."""

    text: str
    points: Sequence[Point]
    settings: Mapping[str, Any] = field(default_factory=dict)


PLAIN = {"enable_prefix_caching": False, "max_model_len": 8192, "max_num_seqs": 512}
"""With as many sequences in a step as vLLM was measured with."""


def make_workloads(
    *, batches: Sequence[int], requests: int | None = None, scale: float = 1.0, budget: int = 8192, seed: int = 0
) -> dict[str, Workload]:
    """All workloads by name. ``requests`` and ``scale`` make them smaller than the published ones; ``budget`` is the
    most tokens of a step."""

    def named(name: str, temperature: float = 0.0) -> list[Point]:
        return [Point(name, make_workload(name, seed=seed, requests=requests), temperature)]

    decodes = [_decode(batch, budget) for batch in batches]
    workloads = {
        "decode": Workload("prompts of 512, 128 steps that decode the whole batch", decodes, PLAIN),
        "mixed256": Workload(
            "256 at once, prompt and output each uniform 100 to 1024, temperature 0.6",
            named("mixed256", temperature=0.6),
            PLAIN,
        ),
        "chat1000": Workload("1000 at once, prompt and output log-normal, greedy", named("chat1000"), PLAIN),
        "prefill": Workload("64 prompts of 2048, 1 token out", named("prefill"), PLAIN),
        "prefix": Workload(
            "15 000 tokens, cold and cached, and 64 more",
            _shared(("cold", "hot"), PREFIX_TOKENS),
            {"enable_prefix_caching": True, "max_model_len": 16_384},
        ),
        "swap": _swap(scale),
        "longctx": _long_contexts(budget),
    }
    return {name: _scaled(workload, scale) for name, workload in workloads.items()}


def _decode(batch: int, budget: int) -> Point:
    """As many more tokens as it takes until all prompts are read, so that ``DECODE_STEPS`` steps are full."""
    prefills = -(-batch * DECODE_PROMPT // budget)
    trace = make_trace([DECODE_PROMPT] * batch, DECODE_STEPS + prefills + 1)
    return Point(f"decode/{batch}", trace, batch=batch)


def _swap(scale: float) -> Workload:
    """The device has room for little more than two prefixes, so three others push the first out."""
    return Workload(
        "a prefix of 16 320 tokens: cold, on the device, and in the host tier after three others",
        _shared(("cold", "device", "", "", "", "host"), SWAPPED_TOKENS - TAIL_TOKENS),
        {
            "enable_prefix_caching": True,
            "max_model_len": 32_768,
            "num_gpu_blocks_override": max(round(9 * SWAPPED_TOKENS // 4 * scale) // 16, 8),
            "swap_space": 16.0,
        },
    )


def _long_contexts(budget: int) -> Workload:
    alone = [Point(f"longctx/{name}", make_trace([size], LONG_OUTPUT), batch=1) for name, size in LONG_PROMPTS]
    together = make_trace([32_768] * 8, LONG_OUTPUT + -(-8 * 32_768 // budget))
    return Workload(
        "prompts of 8192, 32768 and 130944 alone, and eight of 32768, 128 out",
        [*alone, Point("longctx/32k x 8", together, batch=8)],
        {"enable_prefix_caching": False, "max_model_len": 131_072},
    )


def _shared(names: Sequence[str], prefix_tokens: int) -> list[Point]:
    """Prompts that begin alike, one after another; those without a name begin otherwise and are not shown."""
    workload = "prefix" if "hot" in names else "swap"
    return [
        Point(
            f"{workload}/{name or 'filler'}",
            make_trace(
                [prefix_tokens + TAIL_TOKENS], 1,
                prefix_groups=0 if name else 1 + number, prefix_tokens=prefix_tokens,
            ),
            shown=bool(name),
        )
        for number, name in enumerate(names)
    ]  # fmt: skip


def _scaled(workload: Workload, scale: float) -> Workload:
    if scale == 1.0:
        return workload
    for point in workload.points:
        scaled(point.trace, scale)
    settings = dict(workload.settings)
    settings["max_model_len"] = round(settings["max_model_len"] * scale) + 16
    return Workload(workload.text, workload.points, settings)
