"""What a drafting head costs: ms per step, per token, and of the head's own passes, from CUDA graphs and without.

    python -m tests.gpu.speculation.bench_heads llama8b [--drafts 3 4 5] [--batches 1 8 32]
        [--modes follow graphs eager] [--tokens 193] [--profile] [--json FILE]

As :mod:`tests.gpu.speculation.bench_drafts`, with an EAGLE-3 head of the published shape: one layer of the model's
sizes, a vocabulary of 32,000. Its weights are random like the model's. So acceptance is set: each step accepts as many
drafts as give in the mean the tokens per step of `PUBLISHED`. The head guesses all of them, and all its guesses are the
token that the model says; those beyond are not counted as found.

``follow``: the head reads what the model computes, and guesses nothing. ``graphs``, ``eager``: it guesses ``drafts``
tokens of each row in each step. ``head ms`` is the device's time from the first kernel of the head's to the last,
before a step and behind it. With ``--profile`` the last mode's graphs are replayed, and their kernels listed as by
:mod:`tests.gpu.bench.profile_decode`. With ``--cpu`` a tiny model is measured, to see that all this works.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagebus.actors.bench.driver.shapes import SHAPES, write_model_folder
from pagebus.actors.executor.graphs.graphs import Graphs
from pagebus.actors.executor.graphs.head_passes import Guess, follow_of
from pagebus.actors.executor.models.eagle3 import Eagle3
from pagebus.actors.executor.step.head_drafts import HeadDrafts
from pagebus.bus.messages import StepPlan
from tests.actors.executor.speculation.tiny_head import TinyHead
from tests.gpu.bench.bench_step import DEPTH, PROMPT_TOKENS, run_plans
from tests.gpu.bench.profile_decode import kernels_of, table_of
from tests.gpu.speculation.bench_drafts import WARM_STEPS, prompts
from tests.gpu.speculation.drafted_plans import TOKEN, DraftedScheduler, prepare
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, REFERENCE_CONFIGS, make_reference

PUBLISHED = {2: 2.36, 3: 2.79, 4: 3.08, 5: 3.32, 6: 3.46, 7: 3.54}
"""Tokens per step by drafts, of the 8B with its published head on MT-bench, greedy
(https://github.com/vllm-project/vllm/pull/20780)."""
MODES = ("follow", "graphs", "eager")
DRAFT_VOCAB = 32_000


class AcceptedScheduler(DraftedScheduler):
    """Each step of decodes accepts as many drafts as make ``tokens`` of a row and step in the mean."""

    def __init__(self, driver: Driver, num_drafts: int, tokens: float) -> None:
        super().__init__(driver, num_drafts, right=True)
        self.tokens = tokens

    def accepted(self, drafts: int) -> int:
        return accepted_in(self.step, self.tokens) if drafts else 0


def accepted_in(step: int, tokens: float) -> int:
    """Drafts that the plan behind ``step`` others accepts."""
    return int((step + 1) * (tokens - 1)) - int(step * (tokens - 1))


class HeadClock:
    """How long the passes of a head take, before and behind steps."""

    def __init__(self, drafts: HeadDrafts) -> None:
        self.spans: list[tuple[Any, Any]] = []
        self._drafts, self._cuda = drafts, drafts.features.is_cuda
        self.draft, self.follow = drafts.draft, drafts.follow
        drafts.draft = self._timed(self.draft)  # type: ignore[method-assign]
        drafts.follow = self._timed(self.follow)  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*given: Any) -> None:
            began = self._now()
            call(*given)
            self.spans.append((began, self._now()))

        return timed

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> float:
        """Milliseconds of all spans, which the device has passed."""
        self._drafts.draft, self._drafts.follow = self.draft, self.follow  # type: ignore[method-assign]
        if self._cuda:
            return sum(began.elapsed_time(ended) for began, ended in self.spans)
        return sum(ended - began for began, ended in self.spans) * 1e3


def head_of(driver: Driver) -> HeadDrafts:
    drafts = driver.engine._loaded.runner.head
    assert drafts is not None
    return drafts


def force(driver: Driver, counts: Iterator[int]) -> None:
    """Let every guess be right, and each step find so many of them."""
    prepare(driver, "full")
    head, drafting = head_of(driver).head, driver.engine._loaded.runner.drafting
    assert isinstance(head, Eagle3)
    assert drafting is not None
    with torch.inference_mode():
        head.token_ids.fill_(TOKEN)
    drafting._promised = lambda: next(counts)  # type: ignore[method-assign]


@contextmanager
def head_eager(graphs: Graphs) -> Iterator[None]:
    """In this block passes of the head are launched kernel by kernel, as if they had no graphs yet."""
    graphs.run_head = lambda wanted: False  # type: ignore[method-assign]
    yield
    del graphs.run_head


def make_plans(driver: Driver, batch: int, drafts: int, num_tokens: int) -> list[StepPlan]:
    """Every plan of ``batch`` greedy sequences of ``num_tokens`` tokens: first all prompts in one."""
    scheduler = AcceptedScheduler(driver, drafts, PUBLISHED[drafts] if drafts else 1.0)
    for prompt in prompts(driver, batch, num_tokens):
        scheduler.add(prompt, num_tokens, temperature=0.0)
    plans = []
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
    assert len(plans[0].new_sequences) == batch
    assert all(len(plan.latest_starts) == batch for plan in plans[1:])
    return plans


def measure(driver: Driver, batch: int, drafts: int, mode: str, num_tokens: int) -> dict[str, Any]:
    """Figures of one batch size, number of drafts and mode."""
    plans, runner = make_plans(driver, batch, drafts, num_tokens), driver.engine._loaded.runner
    force(driver, (accepted_in(step, PUBLISHED[drafts]) if drafts else 0 for step in itertools.count(1)))
    first, stats = 1 + WARM_STEPS, driver.engine.stats
    with head_eager(runner.graphs) if mode == "eager" and runner.graphs is not None else nullcontext():
        run_plans(driver, plans[:first])
        clock, host_s, steps = HeadClock(head_of(driver)), stats.host_s, stats.steps
        results = run_plans(driver, plans[first:-1])
        head_ms, count = clock.stop(), stats.steps - steps
    tokens = sum(len(result.token_ids) for result in results) / len(results) / batch
    step_ms = statistics.median((b.done_s - a.done_s) * 1e3 for a, b in itertools.pairwise(results))
    return {
        "mode": mode,
        "batch": batch,
        "drafts": drafts,
        "step_ms": step_ms,
        "tokens": tokens,
        "token_ms": step_ms / tokens,
        "head_ms": head_ms / count,
        "host_ms": (stats.host_s - host_s) / count * 1e3,
    }


def print_profile(driver: Driver, batch: int, drafts: int) -> None:
    """The kernels of a guess, of a step that verifies, and of what follows it, from replays of their graphs."""
    runner = driver.engine._loaded.runner
    assert runner.graphs is not None
    tokens = batch * (1 + drafts)
    bucket = next(each for each in runner.buckets.verified if each.tokens >= tokens)
    rows = next(iter(runner.buckets.row_sizes(batch)))
    for wanted in (Guess(rows), bucket, follow_of(bucket)):
        captured = runner.graphs._captured[wanted]
        graph = captured if isinstance(captured, torch.cuda.CUDAGraph) else getattr(captured, "graph", None)
        assert graph is not None
        table = table_of(kernels_of(graph))
        print(f"# {wanted}: {sum(row['moved_us'] for row in table):.1f} us")
        for row in table[:24]:
            print(f"{row['per_step']:>6.1f} {row['there_us']:>8.2f} {row['moved_us']:>9.2f} {row['kernel']}")


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['mode']:>6} {row['batch']:>6} {row['drafts']:>6} {row['step_ms']:>9.3f} {row['tokens']:>8.2f} "
        f"{row['token_ms']:>10.3f} {row['head_ms']:>9.3f} {row['host_ms']:>9.3f}",
        flush=True,
    )


def write_head(folder: Path, model: str) -> Path:
    """A head of the published shape for this model, without weights."""
    folder.mkdir()
    told = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCAB}
    (folder / "config.json").write_text(json.dumps({**SHAPES[model], **told, "num_hidden_layers": 1}))
    save_file({}, folder / "model.safetensors")
    return folder


def bench(model: Path, head: Path, arguments: argparse.Namespace, **settings: Any) -> list[dict[str, Any]]:
    """All batches, drafts and modes of one engine."""
    began, most = time.perf_counter(), max(arguments.batches)
    driver = Driver(
        model, max_num_seqs=most, max_num_batched_tokens=most * PROMPT_TOKENS, pipeline_depth=DEPTH,
        spec_method="eagle3", spec_model=str(head), spec_tokens=max(arguments.drafts), **settings,
    )  # fmt: skip
    if torch.cuda.is_available() and not arguments.cpu:
        ready_s = time.perf_counter() - began
        driver.synchronize()  # all graphs are there
        print(f"# ready in {ready_s:.1f} s, all graphs after {time.perf_counter() - began:.1f} s")
    rows = []
    for batch, mode in itertools.product(arguments.batches, arguments.modes):
        for drafts in [0] if mode == "follow" else arguments.drafts:
            rows.append(measure(driver, batch, drafts, mode, arguments.tokens))
            print_row(rows[-1])
        if arguments.profile and mode == arguments.modes[-1]:
            print_profile(driver, batch, arguments.drafts[-1])
    driver.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--drafts", nargs="+", type=int, choices=sorted(PUBLISHED), default=[3, 4, 5])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", type=int, default=193)
    parser.add_argument("--profile", action="store_true", help="list the kernels of graphs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu", action="store_true", help="a tiny model, to see that this works")
    arguments = parser.parse_args()
    columns = ("mode", "batch", "drafts", "step ms", "tokens", "ms/token", "head ms", "host ms")
    print(" ".join(f"{name:>{width}}" for name, width in zip(columns, (6, 6, 6, 9, 8, 10, 9, 9), strict=True)))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        if arguments.cpu:
            config = REFERENCE_CONFIGS[0]
            tiny = TinyHead(config.overrides.get("hidden_size", DEFAULTS["hidden_size"]), 307, (1, 0, 1))
            model, head = make_reference(folder, config), tiny.save(folder / "head")
            rows = bench(model, head, arguments, device="cpu", dtype="float32", max_model_len=256)
        else:
            model, head = write_model_folder(arguments.model, folder), write_head(folder / "head", arguments.model)
            rows = bench(model, head, arguments, device="cuda", load_format="dummy", max_model_len=2048)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
