"""What a grammar adds to a decode step: the engine alone, as in :mod:`tests.gpu.bench.bench_step`, with 64 sequences.

    python -m tests.gpu.bench.bench_grammars llama8b qwen06b [--batch 64] [--threads 8 4 1] [--tokenizer tokenizer.json]

Each model's step with plain sampling, with top-p (which is sampled behind the pass, as grammars are), and with all
sequences following one JSON schema: a long array of objects with strings, numbers, enums and patterns; by so many
``--threads``, and once with masks that are never filled, which is the least that a grammar can add. "Launched" is
without the graphs of sampling, kernel by kernel. Masks of some states take long, so the mean counts beside the median.
Without a tokenizer nearly all tokens are a blank and a number.

Where the time of a step goes is told by its moments, median/mean in microseconds, in the device thread but for the
second:

    wait      from asking for the tokens of the step before until they are there
    hand      from their being there (in the completion thread) until the device thread has them
    follow    giving them to the matchers
    fill      the masks
    launch    copying the masks and sampling, behind the forward pass
    next      taking the next plan, and launching its forward pass, until the next tokens are asked for
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.executor import engine
from pagebus.actors.executor.actor import SWITCH_INTERVAL_S
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.sampling.followers import ConstrainedRuns
from pagebus.actors.executor.sampling.grammars import LANES_PER_THREAD, Grammars
from pagebus.actors.model.grammars.grammar import write_grammar
from pagebus.bus.messages import Int32Array, StructuredOutput
from tests.gpu.bench.bench_step import DEPTH, measure
from tests.helpers.engine_driver import Driver

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 60},
            "code": {"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]{3,9}$"},
            "amount": {"type": "number", "minimum": 0, "maximum": 100000},
            "state": {"enum": ["open", "closed", "in progress"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        },
        "required": ["name", "code", "amount", "state", "tags"],
        "additionalProperties": False,
    },
}
MOMENTS = ("wait", "hand", "follow", "fill", "launch", "next")


class Timed(Grammars):
    """Grammars that note when what is done. ``filled``: whether masks are; if not, sequences say what they like."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.filled = True
        self.times: dict[str, list[float]] = defaultdict(list)
        self._landed_s: deque[float] = deque()
        self._at_s = time.perf_counter()

    def use(self, threads: int, lanes_each: int, *, filled: bool) -> None:
        """From now on; nothing is under way."""
        self._num_threads, self._num_lanes = threads, lanes_each * threads
        self._fillers, self.filled = None, filled
        self._asked = ConstrainedRuns.none()
        self.times.clear()

    def landed(self, tokens: Int32Array) -> None:
        self._landed_s.append(time.perf_counter())
        super().landed(tokens)

    def launched(self, work: StepWork) -> None:
        super().launched(work)
        self._note("launch")

    def _note(self, moment: str) -> None:
        now_s = time.perf_counter()
        self.times[moment].append(now_s - self._at_s)
        self._at_s = now_s

    def _ask(self, work: StepWork) -> None:
        super()._ask(work)
        self._note("next")

    def _follow(self, step: Any, tokens: Int32Array) -> None:
        now_s, landed_s = time.perf_counter(), max(self._at_s, self._landed_s.popleft())
        self.times["wait"].append(landed_s - self._at_s)
        self.times["hand"].append(now_s - landed_s)
        self._at_s = now_s
        if self.filled:
            super()._follow(step, tokens)
        self._note("follow")

    def _fill(self, work: StepWork) -> None:
        if self.filled:
            super()._fill(work)
        else:
            self._masks.fill_(-1)
        self._note("fill")

    def told(self) -> str:
        """Medians and means in microseconds."""
        found = ((moment, self.times[moment]) for moment in MOMENTS if self.times[moment])
        return ", ".join(
            f"{moment} {statistics.median(each) * 1e6:.0f}/{statistics.mean(each) * 1e6:.0f}" for moment, each in found
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """Parameters of the sequences, threads and lanes of each, whether masks are filled, whether sampling may come from
    graphs."""

    params: dict[str, Any]
    threads: int = 1
    lanes_each: int = LANES_PER_THREAD
    filled: bool = True
    graphs: bool = True


def variants(threads: list[int]) -> dict[str, Variant]:
    """By name."""
    wanted = StructuredOutput(kind="json", text=json.dumps(SCHEMA), field="bench")
    grammar = {"grammar": write_grammar(wanted)}
    return {
        "plain": Variant({}),
        "top-p": Variant({"top_p": 0.9}),
        "top-p, launched": Variant({"top_p": 0.9}, graphs=False),
        "penalties": Variant({"presence_penalty": 0.1}),
        "penalties, launched": Variant({"presence_penalty": 0.1}, graphs=False),
        "unfilled": Variant(grammar, filled=False),
        "unfilled, launched": Variant(grammar, filled=False, graphs=False),
        **{f"{count} threads": Variant(grammar, count) for count in threads},
        **{f"{threads[0]} with {lanes} lanes": Variant(grammar, threads[0], lanes) for lanes in (1, 4)},
        f"{threads[0]} threads, launched": Variant(grammar, threads[0], graphs=False),
    }


def bench_variant(driver: Driver, batch: int, variant: Variant) -> dict[str, Any]:
    """Figures of one variant; the first time warms up, and has graphs captured that are missing."""
    grammars, graphs = driver.engine._grammars, driver.engine._loaded.runner.graphs
    assert isinstance(grammars, Timed)
    assert graphs is not None
    with pytest.MonkeyPatch.context() as patch:
        if not variant.graphs:
            patch.setattr(graphs, "can_resample", lambda wanted: False)
        for _ in range(2):
            grammars.use(variant.threads, variant.lanes_each, filled=variant.filled)
            row = measure(driver, batch, **variant.params)
            driver.synchronize()
    row["step_mean_ms"] = row["device_ms"] / row["busy_share"]
    row["moments"] = grammars.told()
    return row


def bench_model(name: str, batch: int, threads: list[int], tokenizer: Path | None) -> dict[str, Any]:
    """All variants in one engine."""
    gc.collect()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as parent:
        folder = write_model_folder(name, Path(parent))
        if tokenizer:
            shutil.copy(tokenizer, folder / "tokenizer.json")
        driver = Driver(
            folder, device="cuda", load_format="dummy", max_model_len=4096, max_num_seqs=batch, pipeline_depth=DEPTH
        )
        driver.synchronize()  # all graphs are there
        rows: dict[str, dict[str, Any]] = {}
        for variant, wanted in variants(threads).items():
            rows[variant] = row = bench_variant(driver, batch, wanted)
            added, mean = (row[each] / rows["plain"][each] - 1 for each in ("step_ms", "step_mean_ms"))
            print(
                f"{name} batch {batch} {variant:>19}: step {row['step_ms']:.3f} ms {added:+.1%} "
                f"(mean {row['step_mean_ms']:.3f} {mean:+.1%}, p99 {row['step_p99_ms']:.3f}), "
                f"device {row['device_ms']:.3f}, host {row['host_ms']:.3f}; {row['moments']}",
                flush=True,
            )
        driver.close()
    return {"model": name, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[8, 12, 4, 1])
    parser.add_argument("--tokenizer", type=Path)
    arguments = parser.parse_args()
    engine.Grammars = Timed  # type: ignore[misc]
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    names = arguments.models
    print(json.dumps([bench_model(name, arguments.batch, arguments.threads, arguments.tokenizer) for name in names]))


if __name__ == "__main__":
    main()
